"""Train ten short CPU runs with two checkouts and compare losses, metrics and weights.

    python bench/same_bits.py OLD_CHECKOUT NEW_CHECKOUT [--dropout 0.1]

Covers all APIs (command line, `Trainer`, the loop, an estimator), four tasks, two precisions, accumulation, early stopping with
the best model, two ranks, and a run that is killed and resumed. Each run trains a two-layer BERT in a single-threaded process.
The table shows the largest difference of each kind, relative for values above 1. Exits with 1 if a run differs.
"""

from __future__ import annotations

import argparse
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
TESTS = HERE.parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from tiny_model import save_tiny_bert, sentences, write_csv  # noqa: E402

RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "text": (),
    "pair": (),
    "pair_bf16": ("--bf16", "true"),
    "multilabel": (),
    "regression": (),
    "accumulation": ("--gradient_accumulation_steps", "2"),
    "best": (
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "3",
        "--load_best_model_at_end",
        "--early_stopping_patience",
        "1",
    ),
    "ranks": (),
    "killed": ("--save_steps", "2", "--save_strategy", "steps", "--max_steps", "40"),
}
RUNS = (*COMMANDS, "trainer", "loop", "estimator")


def write_data(folder: Path, run: str) -> Path:
    """Write 120 examples that a tiny model can learn; return the CSV file."""
    rows: list[dict[str, Any]] = []
    for i, (text, good) in enumerate(sentences(120)):
        word = "good" if good else "bad"
        labels = {"accumulation": "abcdef"[i % 6], "regression": len(text) / 7, "multilabel": f"{word};{i % 3}"}
        texts = {"sentence1": text, "sentence2": text[::-1]} if "pair" in run else {"text": text}
        rows.append({**texts, "label": labels.get(run, word)})
    return Path(write_csv(folder / f"{run}.csv", rows))


def train_command(folder: Path, run: str) -> None:
    """Train with `tunesmith train`; the run `killed` is killed at its third checkpoint and resumed."""
    command = [sys.executable, *(RANKS if run == "ranks" else ()), "-m", "tunesmith", "train"]
    command += ["--train_file", str(write_data(folder, run)), "--model_name_or_path", str(folder / "bert")]
    command += ["--output_dir", str(folder / run), "--cache_dir", str(folder / "cache"), "--learning_rate", "1e-3"]
    command += ["--use_cpu", "--per_device_train_batch_size", "8", "--max_steps", "12", *COMMANDS[run]]
    if run == "killed":
        process = subprocess.Popen(command, stdout=sys.stderr)
        while process.poll() is None and not (folder / run / "checkpoint-6").exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=sys.stderr)


def train_trainer(folder: Path) -> None:
    """Train with `Trainer`, as a script would."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

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


def train_loop(folder: Path) -> None:
    """Train with `train_events`, and write the losses as an event log."""
    from safetensors.torch import save_file
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    import tunesmith as ts
    from tunesmith.events import StepDone, to_json

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert")
    texts, labels = zip(*sentences(120), strict=True)
    rows = ts.TokenRows.from_lists({**tokenizer(list(texts)), "labels": [int(label) for label in labels]})
    batches = ts.Batches(rows, ts.Padding(), 4, seed=0, accumulation=2)
    steps, ends = ts.epoch_ends_for(batches.steps_in_epoch, max_steps=0, num_epochs=2)
    plan = ts.Plan(steps, ends, ts.Schedule("linear", 1e-3, 5, steps), seed=0)
    optimizer = ts.make_optimizer(model, learning_rate=1e-3, weight_decay=0.01)
    state = ts.TrainState(model, optimizer, ts.TaskLoss(ts.Task.BINARY, 2), ts.make_runtime(use_cpu=True))
    done = [to_json(event) for event in ts.train_events(state, batches, plan) if isinstance(event, StepDone)]
    (folder / "loop" / "model").mkdir(parents=True)
    (folder / "loop" / "journal.jsonl").write_text("\n".join(map(json.dumps, done)) + "\n")
    save_file(model.state_dict(), folder / "loop" / "model" / "model.safetensors")


def train_estimator(folder: Path) -> None:
    """Fit a `TextClassifier` with a run folder."""
    from tunesmith import TextClassifier

    texts, labels = map(list, zip(*sentences(120), strict=True))
    options = {"learning_rate": 1e-3, "max_steps": 12, "use_cpu": True}
    model = TextClassifier(str(folder / "bert"), output_dir=str(folder / "estimator"), options=options)
    model.fit(texts, labels)


def numbers_in(value: Any, name: str = "") -> dict[str, float]:
    """Return the numbers in JSON data by their path."""
    if not isinstance(value, dict):
        return {name: float(value)} if isinstance(value, (int, float)) else {}
    return {k: v for key, part in value.items() for k, v in numbers_in(part, f"{name}/{key}").items()}


def read_run(run: Path) -> dict[str, Any]:
    """Return losses, metrics and weights of a run, as numbers by name."""
    from safetensors.numpy import load_file

    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "learning_rate")
    losses = {f"{n}/{e['step']}": e[n] for e in events if e["event"] == "StepDone" for n in names}
    metrics = {f"{e['split']}/{e['step']}": e["metrics"] for e in events if e["event"] == "Evaluated"}
    final = json.loads((run / "metrics.json").read_text()) if (run / "metrics.json").exists() else {}
    scores = numbers_in({**metrics, **final})
    return {"losses": losses, "metrics": scores, "weights": load_file(run / "model" / "model.safetensors")}


def largest_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the largest difference (relative for values above 1), and the number of names that only one side has."""
    import numpy as np

    common = old.keys() & new.keys()
    pairs = [(np.asarray(old[name], float), np.asarray(new[name], float)) for name in common]
    largest = max((float((abs(a - b) / np.maximum(abs(b), 1)).max()) for a, b in pairs), default=0.0)
    only_old, only_new = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    more = f" ({only_old} only old, {only_new} only new)" if only_old or only_new else ""
    return (f"{largest:.0e}" if largest else "equal") + more


def compare(old: Path, new: Path) -> bool:
    """Print a row per run; return whether all are equal."""
    print("| Run | Steps | Losses and gradient norms | Metrics | Weights |\n|---|---:|---|---|---|")
    equal = True
    for log in sorted(new.rglob("journal.jsonl")):
        name = str(log.parent.relative_to(new))
        one, two = read_run(old / name), read_run(log.parent)
        found = [largest_difference(one[part], two[part]) for part in ("losses", "metrics", "weights")]
        equal &= found == ["equal"] * 3
        print(f"| {name} | {len(two['losses']) // 3} | {' | '.join(found)} |", flush=True)
    return equal


def main() -> None:
    """Train with both checkouts, one process per run, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, name) for name in ("old", "new")]
        for checkout, folder in zip(args.checkouts, folders, strict=True):
            save_tiny_bert(folder / "bert", **dict.fromkeys(rates, args.dropout))
            paths = f"{checkout.resolve() / 'src'}:{TESTS}"
            quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
            for run in RUNS:
                subprocess.run(
                    [sys.executable, str(HERE), "--one", run, str(folder)], env=os.environ | quiet, check=True
                )
        sys.exit(not compare(*folders))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--one", run, folder]:
            ways = {"trainer": train_trainer, "loop": train_loop, "estimator": train_estimator}
            train_command(Path(folder), run) if run in COMMANDS else ways[run](Path(folder))
        case _:
            main()
