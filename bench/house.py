"""How large is the source, and how many files does a run pass through? The counts of issue 13.

    OMP_NUM_THREADS=1 python bench/house.py [FOLDER ...] [--files]

Each FOLDER is a checkout (this one if none is given) and becomes a column of the table. A file is on the way of a run when any
code of it runs besides the statements of the module itself (as issue 13 counted). Both runs train a tiny BERT on the CPU:
`tunesmith train` on a csv file, and a script that imports `Trainer`, makes one, and calls `train()` with evaluation and saves.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parents[1]
VERBS = ("add_arguments", "run", "main")
"""Function names that are a contract: every verb of the command line has its own."""


class Trace:
    """The files under a folder in which a function or a class body ran, over all threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}{os.sep}"
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.folder) and code.co_name != "<module>":
            self.files.add(code.co_filename.removeprefix(self.folder))

    def run(self, work: Callable[[], object]) -> None:
        """Traces one call, and the threads it starts."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """A csv file of labelled sentences and a tiny model."""
    sys.path.insert(0, str(HERE / "tests"))
    from tiny_model import save_tiny_bert, sentences, write_csv

    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(200)]
    return write_csv(folder / "x.csv", rows), save_tiny_bert(folder / "bert")


def train_command(folder: Path) -> Callable[[], object]:
    """`tunesmith train --train_file x.csv`, in this process."""
    data, model = make_inputs(folder)
    words = [
        "train",
        "--train_file",
        str(data),
        "--model_name_or_path",
        str(model),
        "--output_dir",
        str(folder / "run"),
    ]

    def work() -> None:
        from tunesmith.cli.main import main

        code = main([*words, "--num_train_epochs", "1", "--per_device_train_batch_size", "16"])
        assert code in (None, 0), code

    return work


def train_trainer(folder: Path) -> Callable[[], object]:
    """A Trainer script on tokenized rows, with an evaluation and a checkpoint."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    _, path = make_inputs(folder)
    from tiny_model import sentences

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    rows = [{**tokenizer(text), "label": int(good)} for text, good in sentences(120)]
    arguments: dict[str, Any] = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "report_to": "none",
        "use_cpu": True,
    }

    def work() -> None:
        from tunesmith import Trainer, TrainingArguments

        args = TrainingArguments(output_dir=str(folder / "run"), num_train_epochs=1, **arguments)
        collator = DataCollatorWithPadding(tokenizer)
        Trainer(model, args, train_dataset=rows[:80], eval_dataset=rows[80:], data_collator=collator).train()

    return work


def trace_here(source: Path, way: str) -> None:
    """Prints the files on one way as JSON; this process has imported nothing of the package yet."""
    sys.path.insert(0, str(source.parent))
    with tempfile.TemporaryDirectory() as name:
        work = {"train": train_command, "trainer": train_trainer}[way](Path(name))
        trace = Trace(source)
        trace.run(work)
    import tunesmith

    assert Path(tunesmith.__file__).parent == source, tunesmith.__file__
    bases = [c.__name__ for c in tunesmith.Trainer.__mro__ if c.__module__.startswith("tunesmith")]
    print("\n" + json.dumps({"files": sorted(trace.files), "bases": bases}))


def trace(source: Path, way: str) -> dict[str, list[str]]:
    """The same in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(source.parent), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--trace", way, str(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def repeated(places: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand in more than one place."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, place in places:
        found[name].append(place)
    return {name: where for name, where in sorted(found.items()) if len(where) > 1}


def functions_of(body: list[ast.stmt]) -> Iterator[str]:
    """Public functions at the top of a module."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node.name


def count_source(source: Path) -> dict[str, Any]:
    """What can be counted without running it."""
    files = {
        path.relative_to(source).as_posix(): path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))
    }
    trees = {name: ast.parse(text) for name, text in files.items()}
    own = [name for name in files if not name.endswith(("__init__.py", "__main__.py"))]
    verbs = {name for name in own if name.startswith("cli/") and "run" in functions_of(trees[name].body)}
    classes = [(n.name, f) for f, tree in trees.items() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    functions = [(n, f) for f, tree in trees.items() for n in functions_of(tree.body) if n not in VERBS]
    return {
        "files": len(files),
        "lines": sum(text.count("\n") for text in files.values()),
        "ignored attributes": sum(len(re.findall(r"type: ignore\[[^]]*attr-defined", text)) for text in files.values()),
        "modules": repeated((Path(f).stem, f) for f in own if f not in verbs and Path(f).stem != "load"),
        "classes": repeated(classes),
        "functions": repeated(functions),
    }


def column(folder: Path) -> dict[str, Any]:
    """One column of the table."""
    source = folder.resolve() / "src" / "tunesmith"
    counts = count_source(source)
    command, trainer = trace(source, "train"), trace(source, "trainer")
    return {
        "lines of src": counts["lines"],
        "modules": counts["files"],
        "files on the way of `tunesmith train x.csv`": command["files"],
        "files on the way of `Trainer.train()`": trainer["files"],
        "classes of `Trainer`, itself among them": trainer["bases"],
        "`type: ignore[attr-defined]`": counts["ignored attributes"],
        "module names that stand in two packages": counts["modules"],
        "class names used twice": counts["classes"],
        "public function names used twice": counts["functions"],
    }


def main() -> None:
    """Prints the table, and with --files what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[HERE])
    parser.add_argument("--files", action="store_true", help="list what was counted")
    parser.add_argument("--trace", choices=("train", "trainer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace:
        trace_here(args.folders[0], args.trace)
        return
    columns = {_commit(folder): column(folder) for folder in args.folders}
    print(f"| what | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for what in next(iter(columns.values())):
        values = [found[what] for found in columns.values()]
        print(f"| {what} | {' | '.join(f'{v if isinstance(v, int) else len(v):,}' for v in values)} |")
    if args.files:
        print(json.dumps(columns, indent=1))


def _commit(folder: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or folder.name


if __name__ == "__main__":
    main()
