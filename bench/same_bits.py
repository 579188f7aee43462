"""Record losses, scores and weights of short CPU runs, to check that two versions of the code train the same bits.

    python bench/same_bits.py CHECKOUT > a.json       # once per checkout
    python bench/same_bits.py --compare a.json b.json # exit status 1 if a run differs

Each run is a process with one thread: tasks, bf16, folds, two ranks, a run that is killed and resumed, and `Trainer`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
RUNS: dict[str, tuple[str, ...]] = {
    "text": (),
    "six_classes": ("--gradient_accumulation_steps", "2"),
    "multilabel": (),
    "regression": (),
    "pair": ("--bf16", "false"),
    "pair_bf16": ("--bf16", "true"),
    "folds": ("--folds", "2"),
    "ranks": (),
    "killed": ("--save_steps", "2", "--save_strategy", "steps", "--max_steps", "40"),
    "trainer": (),
}


def write_data(folder: Path, name: str) -> Path:
    """Write 120 examples that a tiny model can learn; return the CSV file."""
    from tiny_model import sentences, write_csv

    rows: list[dict[str, Any]] = []
    for i, (text, good) in enumerate(sentences(120)):
        word = "good" if good else "bad"
        labels = {"six_classes": "abcdef"[i % 6], "regression": len(text) / 7, "multilabel": f"{word};{i % 3}"}
        texts = {"sentence1": text, "sentence2": text[::-1]} if "pair" in name else {"text": text}
        rows.append({**texts, "label": labels.get(name, word)})
    return Path(write_csv(folder / f"{name}.csv", rows))


def train(folder: Path, name: str) -> None:
    """Train one run as a separate process; the run `killed` is killed at its third checkpoint and resumed."""
    if name == "trainer":
        subprocess.run([sys.executable, str(HERE), "--trainer", str(folder)], check=True, stdout=sys.stderr)
        return
    command = [sys.executable, *(RANKS if name == "ranks" else ()), "-m", "tunesmith", "train"]
    command += ["--train_file", str(write_data(folder, name)), "--model_name_or_path", str(folder / "bert")]
    command += ["--output_dir", str(folder / name), "--cache_dir", str(folder / "cache"), "--learning_rate", "1e-3"]
    command += ["--use_cpu", "--per_device_train_batch_size", "8", "--max_steps", "12", *RUNS[name]]
    if name == "killed":
        process = subprocess.Popen(command, stdout=sys.stderr)
        while process.poll() is None and not (folder / name / "checkpoint-6").exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=sys.stderr)


def train_with_trainer(folder: Path) -> None:
    """Train with `Trainer`, as a script would."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from tiny_model import sentences
    from tunesmith import Trainer, TrainingArguments

    set_seed(0)  # the classification head is new
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert")
    rows = [{**tokenizer(text), "label": int(good)} for text, good in sentences(120)]
    options: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_steps": 5}
    args = TrainingArguments(str(folder / "trainer"), max_steps=12, **options)
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(folder / "trainer" / "model"))


def bits_of(run: Path) -> dict[str, Any]:
    """Return the losses of the event log, the scores, and a hash of the weights."""
    from safetensors.numpy import load_file

    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "StepDone"]
    losses = {e["step"]: [e["loss"], e["grad_norm"], e["learning_rate"]] for e in steps}
    digest = hashlib.sha256()
    for name, values in sorted(load_file(run / "model" / "model.safetensors").items()):
        digest.update(name.encode() + values.tobytes())
    metrics = json.loads((run / "metrics.json").read_text()) if (run / "metrics.json").exists() else None
    return {"losses": losses, "metrics": metrics, "weights": digest.hexdigest()[:16]}


def record(checkout: Path) -> dict[str, Any]:
    """Train all runs with the package of a checkout."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = f"{checkout.resolve() / 'src'}:{HERE.parents[1] / 'tests'}"
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from tiny_model import save_tiny_bert

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        save_tiny_bert(Path(name, "bert"))
        for run in RUNS:
            train(Path(name), run)
            for log in sorted(Path(name, run).rglob("journal.jsonl")):
                found[str(log.parent.relative_to(name))] = bits_of(log.parent)
    return found


def compare(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Print a table; return 1 if a run differs."""
    print("| run | steps | weights | differences |\n|---|---:|---|---|")
    different = 0
    for run in sorted(first.keys() | second.keys()):
        a, b = first.get(run, {}), second.get(run, {})
        wrong = [part for part in ("losses", "metrics", "weights") if a.get(part) != b.get(part)]
        different |= bool(wrong)
        print(f"| {run} | {len(a.get('losses', ()))} | {a.get('weights')} | {', '.join(wrong) or 'none'} |")
    return int(different)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--trainer", folder]:
            train_with_trainer(Path(folder))
        case ["--compare", first, second]:
            sys.exit(compare(json.loads(Path(first).read_text()), json.loads(Path(second).read_text())))
        case [checkout]:
            print(json.dumps(record(Path(checkout)), indent=1))
        case _:
            sys.exit(__doc__)
