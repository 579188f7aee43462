"""Count lines, modules, executed files, commands and options of one or more checkouts.

    OMP_NUM_THREADS=1 python bench/codebase.py [FOLDER ...] [--files]

Each FOLDER is a checkout and becomes a column of the table. A file counts as executed if any of its functions or class
bodies runs. Both runs train a tiny BERT on the CPU: `tunesmith train` on a CSV file, and a `Trainer` script with
evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parents[1]


class Trace:
    """Collector of the files under a folder in which a function or class body runs, in any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}{os.sep}"
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.folder) and code.co_name != "<module>":
            self.files.add(code.co_filename.removeprefix(self.folder))

    def __enter__(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def run_command(folder: Path, trace: Trace) -> None:
    """Run `tunesmith train` in this process."""
    from tiny_model import save_tiny_bert, sentences, write_csv

    data = write_csv(folder / "x.csv", [{"text": text, "label": "ab"[good]} for text, good in sentences(200)])
    words = ["train", "--train_file", str(data), "--model_name_or_path", str(save_tiny_bert(folder / "bert"))]
    with trace:
        from tunesmith.cli.main import main

        code = main([*words, "--output_dir", str(folder / "run"), "--num_train_epochs", "1"])
    assert code in (None, 0), code


def run_trainer(folder: Path, trace: Trace) -> None:
    """Train with `Trainer` on tokenized examples, with an evaluation and a checkpoint."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    from tiny_model import save_tiny_bert, sentences

    path = save_tiny_bert(folder / "bert")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    rows = [{**tokenizer(text), "label": int(good)} for text, good in sentences(120)]
    options: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "report_to": "none", "use_cpu": True}
    with trace:
        from tunesmith import Trainer, TrainingArguments

        args = TrainingArguments(output_dir=str(folder / "run"), num_train_epochs=1, **options)
        collator = DataCollatorWithPadding(tokenizer)
        Trainer(model, args, train_dataset=rows[:80], eval_dataset=rows[80:], data_collator=collator).train()


def trace_here(source: Path, way: str) -> None:
    """Print the executed files as JSON; this process has not imported the package yet."""
    sys.path[:0] = [str(source.parent), str(HERE / "tests")]
    trace = Trace(source)
    with tempfile.TemporaryDirectory() as name:
        {"train": run_command, "trainer": run_trainer}[way](Path(name), trace)
    from tunesmith import RunConfig
    from tunesmith.cli.main import ALIASES, VERBS

    verbs = {verb for group in VERBS.values() for verb in group} - set(ALIASES)
    print("\n" + json.dumps({"files": sorted(trace.files), "verbs": len(verbs), "options": len(fields(RunConfig))}))


def in_process(source: Path, way: str) -> dict[str, Any]:
    """Run `trace_here` in a new process."""
    env = {**os.environ, "PYTHONPATH": str(source.parent), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, __file__, "--trace", way, str(source)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def lines_of(files: list[Path]) -> int:
    """Return the number of lines in these files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def column(folder: Path) -> dict[str, Any]:
    """Return the counts of one checkout."""
    source = folder.resolve() / "src" / "tunesmith"
    files = sorted(source.rglob("*.py"))
    command, trainer = in_process(source, "train"), in_process(source, "trainer")
    return {
        "Lines in src": lines_of(files),
        "Lines in tests": lines_of(sorted((folder / "tests").rglob("*.py"))),
        "Modules": len(files),
        "Lines in Trainer": lines_of([p for p in files if p.relative_to(source).parts[0].startswith("trainer")]),
        "Files executed by `tunesmith train`": command["files"],
        "Files executed by `Trainer.train()`": trainer["files"],
        "Verbs": command["verbs"],
        "Options of `train`": command["options"],
    }


def main() -> None:
    """Print the table, and with --files the executed files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[HERE])
    parser.add_argument("--files", action="store_true", help="list the executed files")
    parser.add_argument("--trace", choices=("train", "trainer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace:
        trace_here(args.folders[0], args.trace)
        return
    columns = {folder.resolve().name: column(folder) for folder in args.folders}
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for what in next(iter(columns.values())):
        values = [found[what] for found in columns.values()]
        print(f"| {what} | {' | '.join(f'{v if isinstance(v, int) else len(v):,}' for v in values)} |")
    if args.files:
        print(json.dumps(columns, indent=1))


if __name__ == "__main__":
    main()
