"""The card of an exported folder: the model's own card, and what was measured of the export; and its `requirements.txt`: the
packages that answer from it without torch, at the measured versions.
"""

from __future__ import annotations

import re
from importlib.metadata import requires, version
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tunesmith import __version__
from tunesmith.inference.checked import table_of
from tunesmith.inference.facts import GraphFacts, ModelFacts

if TYPE_CHECKING:
    from tunesmith.inference.exporting import Exported


def export_card(
    model_card: str, done: Exported, to: str, threads: int, facts: ModelFacts, graph: GraphFacts | None
) -> str:
    """Markdown; the model's card stays on top with its metadata."""
    columns = facts.text_columns or ("text",)
    pair = ', pairs=["..."]' if len(columns) == 2 else ""
    if graph is not None:  # transformers cannot load a graph
        library = graph.engine.removesuffix("runtime")
        model_card = re.sub(r"(?m)^library_name: .*$", f"library_name: {library}", model_card, count=1)
        model_card = model_card.partition("## Use\n")[0]
    speed = [f"| {name} | {value:,.0f} |" for name, value in done.speed.items()]
    lines = [
        model_card.rstrip() or f"# {to} export",
        "",
        f"## Export: {to}",
        "",
        f"Measured on {done.checked.rows:,} {done.checked.split} rows against the original before this folder was written.",
        "Candidates are tried in this order, and the first that is accepted is here. Differences are of the export to the",
        "original, with a 95% interval of a paired test.",
        "",
        table_of(done.tried),
        "",
        f"Size: {done.bytes / 1e6:,.1f} MB (original {done.original_bytes / 1e6:,.1f} MB).",
        "",
        f"Rows a second from text on the CPU, {threads} thread(s) each, best of 3 alternating turns:",
        "",
        "| | rows/s |",
        "|---|---|",
        *speed,
        "",
        "## Use",
        "",
        *([] if graph is None else [graph.installing, ""]),
        "```python",
        "from tunesmith import Predictor",
        "",
        f'Predictor.load("{done.folder.name}").predict(["..."]{pair})',
        "```",
        "",
    ]
    return "\n".join(lines)


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
