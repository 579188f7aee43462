"""Compare models of three or more rendered columns with those of the best single column and the best pair.

    pip install bokeh_sampledata vega_datasets
    OMP_NUM_THREADS=1 python bench/more_columns.py --model ../shared/models/paraphrase-MiniLM-L3-v2 --seeds 3

Each task is trained on every single column, on pairs of the best one with each other column, on all columns, and on all
columns plus a random one ("useless"). Later seeds repeat only the best one or two columns of the first one. Up to 1,000 other
rows are scored. Finished runs in the output file are not repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from tunesmith import finetune
from tunesmith.pipeline.train import RunObserver

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "research" / "measurements" / "more_columns.jsonl"
TEST = 1000
"""Rows that are scored, at most."""
COLUMNS = {
    "titanic": ("name", "class", "age", "sex"),
    "movies": ("Title", "Director", "Country", "Runtime"),
    "airports": ("name", "city", "latitude", "longitude"),
}


def folder_of(package: str) -> Path:
    """Return the data folder of a package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"pip install {package}"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "_data"


def load_task(task: str) -> pd.DataFrame:
    """Return a table with the columns of the task and the column "label"."""
    if task == "titanic":
        table = pd.read_csv(folder_of("bokeh_sampledata") / "titanic_all.csv")
        return table.assign(label=table["survived"].map({0: "died", 1: "survived"}))
    if task == "movies":
        with sqlite3.connect(folder_of("bokeh_sampledata") / "movies.db") as database:
            table = pd.read_sql("select * from omdb where Genre != ''", database)
        table["label"] = table["Genre"].str.split(",").str[0]
    else:
        table = pd.read_csv(folder_of("vega_datasets") / "airports.csv", dtype={"iata": str})
        table["label"] = table["state"]
    common = table["label"].value_counts().index[: 6 if task == "movies" else 12]
    return table[table["label"].isin(common)]


def variants(columns: tuple[str, ...], first: dict[tuple[str, ...], float], seed: int) -> Iterator[tuple[str, ...]]:
    """Yield single columns, pairs with the best of them, all columns, and all with a useless one.

    `first` are the accuracies with the first seed. With other seeds, only its best one or two columns are tried.
    """
    if seed == 0:
        yield from ((name,) for name in columns)
        best = max(columns, key=lambda name: first[name,])
        yield from ((best, name) for name in columns if name != best)
    else:
        yield best_of(first)
    yield columns
    yield (*columns, "useless")


def best_of(first: dict[tuple[str, ...], float]) -> tuple[str, ...]:
    """Return the one or two columns with the highest accuracy."""
    return max((columns for columns in first if len(columns) < 3), key=lambda columns: first[columns])


def score(table: pd.DataFrame, columns: tuple[str, ...], seed: int, args: argparse.Namespace) -> float:
    """Return the accuracy on the held-out rows of a model that is trained on these columns."""
    drawn = table.sample(min(len(table), args.rows + TEST), random_state=seed)
    drawn["useless"] = np.random.default_rng(seed).choice(["red", "green", "blue", "white", "black"], len(drawn))
    if len(columns) < 3:  # one or two columns must be text
        cells = {name: drawn[name].astype("string").str.strip().fillna("").replace("", "unknown") for name in columns}
        drawn = drawn.assign(**{name: values.astype(object) for name, values in cells.items()})
    drawn = drawn[[*columns, "label"]]
    with tempfile.TemporaryDirectory() as folder:
        found = finetune(
            drawn[: args.rows],
            test_data=drawn[args.rows :],
            text_column_names=columns,
            label_column_name="label",
            model_name_or_path=args.model,
            output_dir=f"{folder}/run",
            cache_dir=f"{folder}/cache",
            observer=RunObserver(pages=False),
            recipe="hf",
            validation_split_fraction=0.0,
            num_train_epochs=args.epochs,
            learning_rate=2e-4,
            per_device_train_batch_size=16,
            seed=seed,
            use_cpu=True,
        )
        return float(found.scores["test"]["accuracy"].value or 0.0)


def main() -> None:
    """Run what is missing in the output file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", nargs="+", default=list(COLUMNS))
    parser.add_argument("--rows", type=int, default=300, help="rows to train on")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    known = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    done = {(one["task"], one["rows"], one["seed"], tuple(one["columns"])): one["accuracy"] for one in known}
    for task in args.tasks:
        table, first = load_task(task), dict[tuple[str, ...], float]()
        for seed in range(args.seeds):
            scores = first if seed == 0 else {}
            for columns in variants(COLUMNS[task], first, seed):
                start, key = time.perf_counter(), (task, args.rows, seed, columns)
                if key not in done:
                    done[key] = score(table, columns, seed, args)
                    line = {"task": task, "rows": args.rows, "seed": seed, "columns": columns, "accuracy": done[key]}
                    with args.output.open("a") as out:
                        out.write(json.dumps({**line, "seconds": round(time.perf_counter() - start, 1)}) + "\n")
                scores[columns] = done[key]
            best, every = best_of(first), COLUMNS[task]
            with_useless = scores[*every, "useless"]
            print(
                f"{task} seed {seed}: best of one or two ({', '.join(best)}) {scores[best]:.4f}, all {scores[every]:.4f} "
                f"({100 * (scores[every] - scores[best]):+.1f}), with a useless column {with_useless:.4f} "
                f"({100 * (with_useless - scores[every]):+.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
