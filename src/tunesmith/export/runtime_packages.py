"""`requirements.txt` of an exported folder: the packages that answer from it without torch, at the measured versions."""

from __future__ import annotations

from importlib.metadata import requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tunesmith import __version__

NEEDED = ("numpy", "starlette", "tokenizers", "uvicorn")
NOT_NEEDED = ("huggingface-hub", "openvino-telemetry")
"""tokenizers asks for the first to download, OpenVINO for the second to report its use: neither is done."""


def runtime_requirements(engine: str) -> str:
    """Every package by name and version. For `pip install --no-deps`, which leaves out what is never used (decision 0501)."""
    pins: dict[str, str] = {}
    left = [engine, *NEEDED]
    while left:
        name = canonicalize_name(left.pop())
        if name in pins or name in NOT_NEEDED:
            continue
        pins[name] = version(name)
        asked = [Requirement(text) for text in requires(name) or ()]
        left += [each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    lines = [
        "# pip install --no-deps --no-compile -r requirements.txt",
        f"tunesmith=={__version__}",
        *(f"{name}=={pins[name]}" for name in sorted(pins)),
    ]
    return "\n".join(lines) + "\n"
