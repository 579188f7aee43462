"""Do two versions of the code train the same bits? Ten tiny runs of each checkout: losses of the journal and weights.

    OMP_NUM_THREADS=1 python bench/same_bits.py FOLDER FOLDER

Each FOLDER is a checkout. The runs cover both doors (command line and Trainer), the tasks (two classes, six, several labels,
a number, pairs), precisions, accumulation, a stopped and resumed run, and two ranks. Exit status 1 where a run differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LETTERS = "abcdef"


def rows_of(task: str) -> list[dict[str, Any]]:
    """Rows of a task that a tiny model can learn."""
    from tiny_model import sentences

    rows: list[dict[str, Any]] = []
    for i, (text, good) in enumerate(sentences(120)):
        word, parity = "good" if good else "bad", "odd" if i % 3 else "even"
        labels = {"six": LETTERS[i % 6], "number": len(text) / 7, "many": f"{word};{parity}"}
        texts = {"sentence1": text, "sentence2": text[::-1]} if task == "pair" else {"text": text}
        rows.append({**texts, "label": labels.get(task, word)})
    return rows


def command_words(folder: Path, name: str, task: str, *more: str) -> list[str]:
    """`tunesmith train` on a file of this task."""
    from tiny_model import write_csv

    data = write_csv(folder / f"{name}.csv", rows_of(task))
    return [
        *("train", "--train_file", str(data), "--model_name_or_path", str(folder / "bert"), "--use_cpu"),
        *("--output_dir", str(folder / name), "--per_device_train_batch_size", "8", "--max_steps", "12"),
        *("--learning_rate", "1e-3", "--cache_dir", str(folder / "cache"), *more),
    ]


def command_run(name: str, task: str, *more: str, ranks: int = 1) -> Callable[[Path], Path]:
    """One run by the command line, in this process or on ranks of their own."""

    def run(folder: Path) -> Path:
        words = command_words(folder, name, task, *more)
        if ranks > 1:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
            subprocess.run([*launch, "-m", "tunesmith", *words], check=True, capture_output=True)
            return folder / name
        from tunesmith.cli.main import main

        code = main(words)
        assert code in (None, 0), (words, code)
        return folder / name

    return run


def trainer_run(name: str, *, resume: bool = False, **options: Any) -> Callable[[Path], Path]:
    """One run by a Trainer script."""

    def run(folder: Path) -> Path:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from tiny_model import sentences
        from tunesmith import Trainer, TrainingArguments

        tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
        rows = [{**tokenizer(text), "label": int(good)} for text, good in sentences(120)]

        def train(steps: int, **more: Any) -> None:
            model = AutoModelForSequenceClassification.from_pretrained(folder / "bert")
            given = {"save_steps": 5, "report_to": "none", "use_cpu": True, "disable_tqdm": True, **options}
            args = TrainingArguments(str(folder / name), max_steps=12, **given)
            trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
            if steps < 12:
                trainer.add_callback(stop_at(steps))
            trainer.train(**more)
            trainer.save_model(str(folder / name / "model"))

        if resume:
            train(7)
        train(12, **({"resume_from_checkpoint": True} if resume else {}))
        return folder / name

    return run


def stop_at(step: int) -> Any:
    """A callback that stops a run."""
    from transformers import TrainerCallback

    class StopAt(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return StopAt()


RUNS: dict[str, Callable[[Path], Path]] = {
    "train, two classes": command_run("two", "two"),
    "train, six classes, accumulation": command_run("six", "six", "--gradient_accumulation_steps", "2"),
    "train, several labels": command_run("many", "many"),
    "train, a number": command_run("number", "number"),
    "train, pairs, bf16": command_run("pair", "pair", "--bf16", "true"),
    "train, two ranks": command_run("ranks", "two", ranks=2),
    "Trainer": trainer_run("trainer"),
    "Trainer, bf16, accumulation": trainer_run("trainer_bf16", bf16=True, gradient_accumulation_steps=2),
    "Trainer, smoothing, adafactor": trainer_run("trainer_other", label_smoothing_factor=0.1, optim="adafactor"),
    "Trainer, resumed": trainer_run("trainer_resumed", resume=True),
}


def bits_of(run: Path) -> dict[str, Any]:
    """Losses of the journal, the hash of the weights' bytes."""
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    losses = [[e["step"], e["loss"], e.get("learning_rate")] for e in lines if e["event"] == "StepDone"]
    from safetensors.numpy import load_file

    tensors = load_file(run / "model" / "model.safetensors")
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(name.encode() + values.tobytes())
    return {"steps": len(losses), "losses": losses, "weights": digest.hexdigest()[:16]}


def measure() -> Iterator[tuple[str, dict[str, Any]]]:
    """All runs with the package that this process imports."""
    sys.path.insert(0, str(HERE / "tests"))
    from tiny_model import save_tiny_bert

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_bert(folder / "bert")
        for what, run in RUNS.items():
            with contextlib.redirect_stdout(io.StringIO()):
                found = run(folder)
            yield what, bits_of(found)


def main() -> int:
    """Prints a table; 1 where a run differs."""
    if sys.argv[1:] == ["--here"]:
        print("\n" + json.dumps(dict(measure())))
        return 0
    columns = []
    for folder in map(Path, sys.argv[1:]):
        env = {
            **os.environ,
            "PYTHONPATH": str(folder.resolve() / "src"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            [sys.executable, __file__, "--here"], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        columns.append(json.loads(done.stdout.splitlines()[-1]))
    print("| run | steps | weights | same losses and weights |\n|---|---:|---|---|")
    for what, first in columns[0].items():
        same = all(column[what] == first for column in columns)
        print(f"| {what} | {first['steps']} | {first['weights']} | {'yes' if same else 'NO'} |")
    return int(any(column != columns[0] for column in columns))


if __name__ == "__main__":
    sys.exit(main())
