"""Cross-validation folds, several seeds, or both: one run for each, in subfolders of one folder.

The subfolders are `fold-1`, `fold-2`, ...; `seed-42`, ...; or `fold-1-seed-42`, ... The same command resumes after a crash: a
finished run of the same config, data and model is kept, and a run that was stopped is resumed. `repeats.json` contains the
pooled scores of all held-out examples, and the spread over seeds; `repeats.yaml` the options. With `--move_thresholds`, the
thresholds for an example are fitted to held-out examples of other folds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.config.options import RunConfig, dump_config
from tunesmith.data.rows import read_prediction_columns
from tunesmith.errors import CheckpointError
from tunesmith.events import Event, RunStarted
from tunesmith.files import write_file
from tunesmith.labels import Task, choose_labels
from tunesmith.metrics.calibration import fit_thresholds
from tunesmith.metrics.table import Score, make_suite
from tunesmith.pipeline.prepare import require_same_options, require_same_run
from tunesmith.pipeline.results import draw_and_explain
from tunesmith.pipeline.train import Log, RunObserver, finetune
from tunesmith.report.predictions import PredictedRows, labeled_splits
from tunesmith.runs.folder import RunDir, end_of, read_summary

SUMMARY, OPTIONS = "repeats.json", "repeats.yaml"


@dataclass(frozen=True)
class Repeated:
    """`pooled[seed]` are the scores of all held-out examples by the models of that seed; `runs` the folders, in order."""

    path: Path
    runs: tuple[Path, ...]
    pooled: dict[int, dict[str, Score]]

    def spread(self) -> dict[str, tuple[float, float]]:
        """Return the mean over seeds and the standard deviation between them, by metric."""
        table: dict[str, list[float]] = {}
        for scores in self.pooled.values():
            for name, score in scores.items():
                if score.value is not None:
                    table.setdefault(name, []).append(score.value)
        return {n: (float(np.mean(v)), float(np.std(v, ddof=1)) if len(v) > 1 else 0.0) for n, v in table.items()}


def run_repeats(config: RunConfig, observer: RunObserver) -> Repeated:
    """Train the runs that are not finished, pool the predictions and write the summary."""
    folder = config.run_folder
    require_same_options(config, folder / OPTIONS)
    observer = replace(observer, listeners=[*observer.listeners, partial(_store_options, config)])
    runs: list[tuple[int, Path]] = []
    for one in each_run(config):
        run = RunDir(one.run_folder)
        observer.log(f"Run: {run.path.name}.")
        if end_of(run) is not None:
            require_same_run(one, run)
            observer.log(f"{run.path} is finished and is kept.")
            if observer.pages and not run.report_file.is_file():
                draw_and_explain(run, lambda: None)
        else:
            finetune(one, observer=observer)
        runs.append((one.seed, run.path))
    log = observer.log if config.folds is not None and config.move_thresholds else None
    by_seed = {s: [path for seed, path in runs if s == seed] for s in dict.fromkeys(s for s, _ in runs)}
    pooled = {seed: _pool(_held_out(paths), log) for seed, paths in by_seed.items()}
    found = Repeated(folder, tuple(path for _, path in runs), pooled)
    write_file(folder / SUMMARY, json.dumps(_to_json(found), indent=1).encode())
    return found


def _store_options(config: RunConfig, event: Event) -> None:
    if isinstance(event, RunStarted):
        write_file(config.run_folder / OPTIONS, dump_config(config).encode())


def each_run(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the config of each run. Folds keep the weights of the last step, so that no held-out example selects them."""
    numbers = range(1, config.folds + 1) if config.folds and config.fold is None else [config.fold]
    best = config.load_best_model_at_end
    keep = False if best is None and config.folds is not None else best
    for seed in range(config.seed, config.seed + config.seeds):
        for fold in numbers:
            parts = [f"fold-{fold}"] if len(numbers) > 1 else []
            parts += [f"seed-{seed}"] if config.seeds > 1 else []
            # One validation split for all seeds: without folds, each seed would draw a different one.
            split = config.seed if config.data_seed is None and config.folds is None else config.data_seed
            yield replace(
                config,
                seeds=1,
                seed=seed,
                data_seed=split,
                fold=fold,
                run_name=f"{config.name}-{'-'.join(parts)}",
                output_dir=str(config.run_folder / "-".join(parts)),
                load_best_model_at_end=keep,
            )


def _held_out(folders: list[Path]) -> list[PredictedRows]:
    """Return the held-out examples of these runs. A run without any is an error, unless no run has validation examples."""
    found = {folder: held_out_rows(folder) for folder in folders}
    missing = [folder for folder, rows in found.items() if rows is None]
    if missing and len(missing) < len(found):
        raise CheckpointError(
            "has no predictions for held-out examples, so the scores cannot be pooled",
            where=str(missing[0]),
            fix="Remove this folder and run the same command again to train it.",
        )
    return [rows for rows in found.values() if rows is not None]


def _pool(parts: list[PredictedRows], log: Log | None) -> dict[str, Score]:
    """Return the scores of all held-out examples together. With `log`, thresholds are fitted to them and reported."""
    if not parts:
        return {}
    task = parts[0].task
    gold = np.concatenate([rows.labels for rows in parts])
    if task is Task.REGRESSION:
        return make_suite(task).compute_with_intervals(np.concatenate([rows.predicted for rows in parts]), gold)
    tables = [rows.probabilities for rows in parts if rows.probabilities is not None]
    table, decided = np.concatenate(tables), np.concatenate([rows.predicted for rows in parts])
    moved = None if log is None else fit_thresholds(table, gold, task)
    if moved is not None and log is not None:
        log(moved.line("out-of-fold"))
        decided = choose_labels(table, task).astype(np.int64) if moved.decisions is None else moved.decisions
    return make_suite(task, scores="probabilities").compute_with_intervals(table, gold, decisions=decided)


def held_out_rows(folder: Path) -> PredictedRows | None:
    """Return the validation examples of a run with their predictions, or None."""
    run = RunDir(folder)
    columns, summary = read_prediction_columns(run.predictions_file), read_summary(run.data_summary_file)
    return labeled_splits(columns, summary).get("validation")


def _to_json(found: Repeated) -> dict[str, Any]:
    return {
        "runs": [path.name for path in found.runs],
        "held_out": {str(s): {n: score.to_json() for n, score in scores.items()} for s, scores in found.pooled.items()},
        "spread": {name: {"mean": mean, "deviation": deviation} for name, (mean, deviation) in found.spread().items()},
    }
