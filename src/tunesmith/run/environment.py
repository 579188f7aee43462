"""What a run was made with: versions, machine, command, commit."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tunesmith.run.commit import current_commit

PACKAGES = (
    "tunesmith",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
)


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages a result depends on; None where one is missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def describe_environment() -> dict[str, Any]:
    """A JSON-ready description of this process's surroundings."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": package_versions(),
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "folder": os.getcwd(),
        "commit": current_commit(),
    }
