"""`tunesmith plan` beside the run itself: peak memory, seconds and disk, predicted and measured, over settings that differ.

    python bench/plan_check.py --output plan.json                                    # CPU settings, one after another
    python bench/plan_check.py --lanes 0,1 2,3 4,5 --gpu_lane 12,13,14,15 --output plan.json      # pinned to cores, at once
    python bench/plan_check.py --table plan.json

SHARED_DIR names a folder with `data` and `models` (`bench/audit_labels.py --unpack` makes one); models without weights get random
ones there, since neither memory nor time depends on them.

Each setting is planned by `tunesmith plan --json`, then trained by `tunesmith train`, each as a process of its own on the same
cores, with folders of its own. Memory of a CPU run is the most that the process held; of a GPU run what PyTorch allocated on the
device. The target is 10% for memory and 20% for time in 9 of 10 settings. On a busy machine the seconds mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("SHARED_DIR", "/work/shared"))
L3, GRANITE, L6 = "paraphrase-MiniLM-L3-v2", "granite-embedding-30m-english", "all-MiniLM-L6-v2"
BASE = "bert-base-shape"
TRAIN = """
import os, sys, json, atexit
def note():
    import torch
    if torch.cuda.is_available():
        with open(os.environ["DEVICE_PEAK"], "w") as file:
            json.dump(torch.cuda.max_memory_allocated(), file)
atexit.register(note)
from tunesmith.cli.main import entry
entry()
"""


def _data(task: str, suffix: str = "", *splits: str) -> dict[str, str]:
    return {f"{split}_file": f"{task}/{split}{suffix}.tsv" for split in ("train", *splits)}


REGRESSION, PAIRS = _data("sick", "_relatedness", "validation"), _data("sick", "_entailment", "validation", "test")
CPU: dict[str, dict[str, Any]] = {
    "L6, defaults": {**_data("trec"), "model": L6, "max_train_samples": 1500},
    "L3, evaluation by steps": {
        **_data("subj", "", "validation"),
        "model": L3,
        "max_train_samples": 2000,
        "per_device_train_batch_size": 16,
        "max_seq_length": 64,
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 40,
    },
    "L3, regression, accumulation": {
        **REGRESSION,
        "model": L3,
        "max_train_samples": 2000,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
    },
    "granite, 256 tokens": {
        **_data("r8"),
        "model": GRANITE,
        "max_train_samples": 240,
        "per_device_train_batch_size": 8,
        "max_seq_length": 256,
        "num_train_epochs": 1,
    },
    "L6, pairs, batch 64, test": {
        **PAIRS,
        "model": L6,
        "max_train_samples": 2000,
        "per_device_train_batch_size": 64,
        "num_train_epochs": 1,
    },
    "L6, bf16": {
        **_data("cr", "", "validation"),
        "model": L6,
        "max_train_samples": 800,
        "per_device_train_batch_size": 16,
        "bf16": "true",
        "num_train_epochs": 1,
    },
    "L3, 512 tokens, batch 4": {
        **_data("news6"),
        "model": L3,
        "max_train_samples": 300,
        "per_device_train_batch_size": 4,
        "max_seq_length": 512,
        "num_train_epochs": 1,
    },
    "BERT-base shape": {
        **_data("cr", "", "validation"),
        "model": BASE,
        "max_train_samples": 160,
        "per_device_train_batch_size": 8,
        "max_seq_length": 64,
        "num_train_epochs": 1,
        "recipe": "hf",
    },
    "L6, recipe hf, 3 epochs": {
        **_data("trec"),
        "model": L6,
        "max_train_samples": 700,
        "per_device_train_batch_size": 8,
        "recipe": "hf",
        "num_train_epochs": 3,
    },
    "L3, no validation, batch 128": {
        **_data("cr"),
        "model": L3,
        "validation_split_fraction": 0,
        "per_device_train_batch_size": 128,
        "num_train_epochs": 4,
    },
}
GPU: dict[str, dict[str, Any]] = {
    "GPU: L6, defaults": {**_data("trec"), "model": L6},
    "GPU: BERT-base shape, pairs, batch 64": {
        **PAIRS,
        "model": BASE,
        "per_device_train_batch_size": 64,
        "num_train_epochs": 4,
    },
    "GPU: granite, 512 tokens": {
        **_data("news6"),
        "model": GRANITE,
        "per_device_train_batch_size": 16,
        "max_seq_length": 512,
        "num_train_epochs": 3,
    },
    "GPU: L6, regression, accumulation": {
        **REGRESSION,
        "model": L6,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 50,
        "num_train_epochs": 5,
    },
}


def words_of(setting: dict[str, Any], folder: Path, *, gpu: bool) -> list[str]:
    """The options of a setting for the command line."""
    options = {k: SHARED / "data" / v if k.endswith("_file") else v for k, v in setting.items() if k != "model"}
    options["model_name_or_path"] = _model(setting["model"])
    options |= {"output_dir": folder / "run", "cache_dir": folder / "cache"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return words if gpu else [*words, "--use_cpu"]


def _model(name: str) -> Path:
    if name == BASE:
        return Path(tempfile.gettempdir()) / BASE
    folder = SHARED / "models" / name
    if name != L6 or folder.is_dir():
        return folder
    from tunesmith.encoder.resolve import find_embedded

    return Path(str(find_embedded()))


def make_weights() -> None:
    """A model of BERT-base's shape, and weights for the models of SHARED_DIR that have none: random."""
    import torch
    from transformers import AutoConfig, AutoModel, BertConfig

    torch.manual_seed(0)
    for name in (BASE, *((L3, GRANITE, L6) if "SHARED_DIR" in os.environ else ())):
        folder = _model(name)
        if not (folder / "model.safetensors").exists():
            config = BertConfig() if name == BASE else AutoConfig.from_pretrained(folder)
            AutoModel.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(_model(L3) / file, _model(BASE) / file)


def check(name: str, setting: dict[str, Any], cores: str | None, *, gpu: bool) -> dict[str, Any]:
    """Plans, then trains; what was predicted and what was measured."""
    pinned = ["taskset", "-c", cores] if cores else []
    environment = {**os.environ, **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    environment.pop("OMP_NUM_THREADS", None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = words_of(setting, folder / "plan", gpu=gpu)
        command = [*pinned, sys.executable, "-m", "tunesmith", "plan", "--json", *words]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if said.returncode:
            return {"name": name, "error": said.stderr[-2000:]}
        found = {"name": name, "plan": json.loads(said.stdout)}
        words = words_of(setting, folder / "own", gpu=gpu)
        environment["DEVICE_PEAK"] = str(folder / "peak")
        log, start = (folder / "log").open("w+"), time.monotonic()
        child = subprocess.Popen(
            [*pinned, sys.executable, "-c", TRAIN, "train", *words], env=environment, stdout=log, stderr=log
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = status
        found["seconds"], found["cpu_seconds"] = time.monotonic() - start, used.ru_utime + used.ru_stime
        if status:
            log.seek(0)
            return {**found, "error": log.read()[-2000:]}
        peak = folder / "peak"
        found["peak_bytes"] = json.loads(peak.read_text()) if peak.exists() else used.ru_maxrss * 1024
        run = folder / "own" / "run"
        found["disk_bytes"] = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        found["events"] = [event for event in events if "seconds" in event]
        return found


def show(found: list[dict[str, Any]]) -> None:
    """A line for each setting, then how many are within the targets."""
    good, count = [0, 0], 0
    for one in found:
        if "error" in one:
            print(f"{one['name']:<40} failed: {one['error']}")
            continue
        plan = one["plan"]
        memory, clock = plan["peak_bytes"] / one["peak_bytes"] - 1, plan["seconds"] / one["seconds"] - 1
        good, count = [good[0] + (abs(memory) <= 0.1), good[1] + (abs(clock) <= 0.2)], count + 1
        print(
            f"{one['name']:<40} memory {plan['peak_bytes'] / 1e6:6,.0f} MB for {one['peak_bytes'] / 1e6:6,.0f} ({memory:+.1%})  "
            f"time {plan['seconds']:5.1f} s for {one['seconds']:5.1f} ({clock:+.1%})  "
            f"disk {plan['disk_bytes'] / 1e6:,.0f} MB for {one['disk_bytes'] / 1e6:,.0f} at its end"
        )
    print(f"within the target: memory {good[0]} of {count}, time {good[1]} of {count}")


def main() -> None:
    """All settings, in lanes of cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", nargs="+", default=[""], help="cores of each lane, such as 0,1 2,3")
    parser.add_argument("--gpu_lane", help="cores of the lane that has the GPU; without it no GPU setting is run")
    parser.add_argument("--only", nargs="+", help="parts of the names of the settings to run")
    parser.add_argument("--rows", type=int, help="this many training rows in all settings: a try")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        show(json.loads(args.table.read_text()))
        return
    make_weights()
    found: list[dict[str, Any]] = []
    todo: dict[bool, queue.Queue[tuple[str, dict[str, Any]]]] = {False: queue.Queue(), True: queue.Queue()}
    for gpu, settings in ((False, CPU), (True, GPU if args.gpu_lane else {})):
        for name, setting in settings.items():
            if not args.only or any(part in name for part in args.only):
                todo[gpu].put((name, {**setting, **({"max_train_samples": args.rows} if args.rows else {})}))

    def work(cores: str, *, gpu: bool) -> None:
        while True:
            try:
                name, setting = todo[gpu].get_nowait()
            except queue.Empty:
                return
            found.append(check(name, setting, cores or None, gpu=gpu))
            show(found[-1:])
            sys.stdout.flush()
            if args.output:
                args.output.write_text(json.dumps(found))

    lanes = [threading.Thread(target=work, args=(cores,), kwargs={"gpu": False}) for cores in args.lanes]
    if args.gpu_lane:
        lanes.append(threading.Thread(target=work, args=(args.gpu_lane,), kwargs={"gpu": True}))
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    show(found)


if __name__ == "__main__":
    main()
