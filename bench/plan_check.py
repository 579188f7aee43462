"""`tunesmith plan` beside the run itself: peak memory, seconds and disk, predicted and measured, over settings that differ.

    python bench/plan_check.py --output plan.json                                    # CPU settings, one after another
    python bench/plan_check.py --lanes 0,1 2,3 4,5 --gpu_lanes 10-12 13-15 --output plan.json      # pinned to cores, at once
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("SHARED_DIR", "/work/shared"))
L3, GRANITE, L6 = "paraphrase-MiniLM-L3-v2", "granite-embedding-30m-english", "all-MiniLM-L6-v2"
BASE = "bert-base-shape"
TRAIN = """
import os, sys, json, atexit, logging, time
begun, marks, out = time.time(), {}, os.environ["PLAN_CHECK_OUT"]
def note():
    import torch
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    with open(out, "w") as file:
        json.dump({"peak": peak, "marks": marks}, file)
atexit.register(note)
class Marks(logging.Handler):
    def emit(self, record):
        marks[record.getMessage()] = time.time() - begun
log = logging.getLogger("tunesmith.runs.environment")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(Marks())
from tunesmith.cli.main import entry
entry()
"""
"""Trains, then notes the peak of the device and when each phase was over."""


SHORT = {
    "rows": "max_train_samples",
    "batch": "per_device_train_batch_size",
    "length": "max_seq_length",
    "epochs": "num_train_epochs",
    "accumulation": "gradient_accumulation_steps",
}


def _setting(task: str, model: str, *splits: str, suffix: str = "", **options: Any) -> dict[str, Any]:
    files = {f"{split}_file": f"{task}/{split}{suffix}.tsv" for split in ("train", *splits)}
    named = {SHORT.get(name, name): value for name, value in options.items()}
    return {**files, **({"allow_empty_text": "true"} if task == "cr" else {}), "model": model, **named}


V, ENTAILMENT = "validation", {"suffix": "_entailment"}
BY_STEPS: dict[str, Any] = {"eval_strategy": "steps"}
CPU: dict[str, dict[str, Any]] = {
    "L6, defaults": _setting("trec", L6, rows=300),
    "L3, evaluation by steps": _setting(
        "subj", L3, V, rows=1000, batch=16, length=64, epochs=2, eval_steps=40, **BY_STEPS
    ),
    "granite, 256 tokens": _setting("r8", GRANITE, rows=100, batch=8, length=256, epochs=1),
    "L6, pairs, batch 64": _setting("sick", L6, V, rows=960, batch=64, epochs=1, **ENTAILMENT),
    "BERT-base shape": _setting("cr", BASE, V, rows=100, batch=8, length=64, epochs=1, recipe="hf"),
    "L3, regression, accumulation": _setting(
        "sick", L3, V, suffix="_relatedness", rows=1000, batch=8, accumulation=4, epochs=2
    ),
    "L6, bf16": _setting("cr", L6, V, rows=600, batch=16, bf16="true", epochs=1),
    "L3, 512 tokens, batch 4": _setting("news6", L3, rows=240, batch=4, length=512, epochs=1),
    "L6, recipe hf, 3 epochs": _setting("trec", L6, rows=400, batch=8, recipe="hf", epochs=3),
    "L3, no validation, batch 128": _setting("cr", L3, validation_split_fraction=0, batch=128, epochs=2),
}
GPU: dict[str, dict[str, Any]] = {
    "GPU: L6, defaults": _setting("trec", L6),
    "GPU: granite, 512 tokens": _setting("news6", GRANITE, batch=16, length=512, epochs=3),
    "GPU: BERT-base shape, pairs, batch 64": _setting("sick", BASE, V, "test", batch=64, epochs=4, **ENTAILMENT),
    "GPU: L6, regression, accumulation": _setting(
        "sick", L6, V, suffix="_relatedness", batch=16, accumulation=2, eval_steps=50, epochs=5, **BY_STEPS
    ),
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
    from tunesmith.models.files import find_embedded

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


def check(found: dict[str, Any], setting: dict[str, Any], cores: str | None, *, gpu: bool) -> Iterator[None]:
    """Plans, then trains; adds what was predicted and what was measured, and yields after each."""
    pinned = ["taskset", "-c", cores] if cores else []
    environment = {**os.environ, **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    environment.pop("OMP_NUM_THREADS", None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = words_of(setting, folder / "plan", gpu=gpu)
        command = [*pinned, sys.executable, "-m", "tunesmith", "plan", "--json", *words]
        start = time.monotonic()
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found["plan_seconds"] = time.monotonic() - start
        if said.returncode:
            found["error"] = said.stderr[-2000:]
            return
        found["plan"] = json.loads(said.stdout)
        yield
        words = words_of(setting, folder / "own", gpu=gpu)
        environment["PLAN_CHECK_OUT"] = str(folder / "noted")
        log, start = (folder / "log").open("w+"), time.monotonic()
        child = subprocess.Popen(
            [*pinned, sys.executable, "-c", TRAIN, "train", *words], env=environment, stdout=log, stderr=log
        )
        _, child.returncode, used = os.wait4(child.pid, 0)
        found["seconds"], found["cpu_seconds"] = time.monotonic() - start, used.ru_utime + used.ru_stime
        if child.returncode:
            log.seek(0)
            found["error"] = log.read()[-2000:]
            return
        noted = json.loads((folder / "noted").read_text())
        found |= {"peak_bytes": noted["peak"] or used.ru_maxrss * 1024, "marks": noted["marks"]}
        run = folder / "own" / "run"
        found["disk_bytes"] = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        found["events"] = [event for event in events if "seconds" in event]
        yield


def show(found: list[dict[str, Any]]) -> None:
    """A line for each setting, then how many are within the targets."""
    good, count = [0, 0], 0
    for one in found:
        if "error" in one:
            print(f"{one['name']:<40} failed: {one['error']}")
        if "peak_bytes" not in one:
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
    parser.add_argument("--lanes", nargs="*", default=[""], help="cores of each lane, such as 0,1 2,3")
    parser.add_argument(
        "--gpu_lanes", nargs="+", default=[], help="of the lanes with the GPU; without, no GPU setting is run"
    )
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
    for gpu, settings in ((False, CPU), (True, GPU if args.gpu_lanes else {})):
        for name, setting in settings.items():
            if not args.only or any(part in name for part in args.only):
                todo[gpu].put((name, {**setting, **({"max_train_samples": args.rows} if args.rows else {})}))

    def work(cores: str, *, gpu: bool) -> None:
        while True:
            try:
                name, setting = todo[gpu].get_nowait()
            except queue.Empty:
                return
            found.append(one := {"name": name})
            for _ in check(one, setting, cores or None, gpu=gpu):
                if args.output:
                    args.output.write_text(json.dumps(found))
            show([one])
            sys.stdout.flush()

    lanes = [threading.Thread(target=work, args=(cores,), kwargs={"gpu": False}) for cores in args.lanes]
    lanes += [threading.Thread(target=work, args=(cores,), kwargs={"gpu": True}) for cores in args.gpu_lanes]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    show(found)


if __name__ == "__main__":
    main()
