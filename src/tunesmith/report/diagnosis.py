"""The diagnosis of a run folder: its curves, its config and its label counts brought together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.config.entries import read_entries
from tunesmith.config.load import resolve
from tunesmith.curves.series import Curves, load_curves
from tunesmith.diagnose.advise import judge_reading
from tunesmith.diagnose.evidence import Reading, read_curves
from tunesmith.findings import Finding
from tunesmith.labels import Task
from tunesmith.run.layout import RunDir, open_run, read_summary
from tunesmith.run.ownership import read_holder


def diagnose_run(run: str | Path | RunDir) -> list[Finding]:
    """Findings about a run folder, the verdict first."""
    folder = run if isinstance(run, RunDir) else open_run(run)
    curves = load_curves(folder.path)
    config, summary = read_run_config(folder.config_file), read_summary(folder.data_summary_file)
    return diagnose_with(curves, config, summary, running=is_in_training(folder, curves))


def is_in_training(run: RunDir, curves: Curves) -> bool:
    """Whether a process is still at this run: its journal has no end, and its lock is held."""
    return curves.ended is None and read_holder(run.lock_file) is not None


def diagnose_with(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], *, running: bool = False
) -> list[Finding]:
    """Findings from what was read already."""
    return judge_reading(read_with(curves, config, summary, running=running))


def read_with(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], *, running: bool = False
) -> Reading:
    """The curves with what data_summary.json knows. Only one label a row makes class shares a chance loss."""
    single = summary.get("task") in (None, Task.BINARY, Task.MULTICLASS)
    names = summary.get("labels") if single else None
    return read_curves(
        curves,
        config,
        label_counts=train_label_counts(summary) if single else None,
        num_labels=len(names) if isinstance(names, (list, tuple)) and len(names) >= 2 else None,
        label_names=tuple(map(str, names)) if isinstance(names, (list, tuple)) else (),
        floor=_constant_loss(summary),
        floors=_floors(summary),
        probe_rows=summary.get("probe_rows"),
        running=running,
    )


def _constant_loss(summary: Mapping[str, Any]) -> float | None:
    """The loss of the best constant on the validation rows, from `best_constant` of data_summary.json."""
    found: Any = summary.get("best_constant")
    for key in ("metrics", "loss"):
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, (int, float)) and 0 < found < 1e30 else None


def _floors(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Scores of simpler models on the validation rows, from `floors` of data_summary.json: name -> metric -> value."""
    split: Any = summary.get("floors")
    split = split.get("validation") if isinstance(split, dict) else None
    found: dict[str, dict[str, float]] = {}
    for name, scores in (split if isinstance(split, dict) else {}).items():
        values = (
            {m: v.get("value") if isinstance(v, dict) else v for m, v in scores.items()}
            if isinstance(scores, dict)
            else {}
        )
        found[str(name)] = {str(m): float(v) for m, v in values.items() if isinstance(v, (int, float))}
    return found


def train_label_counts(summary: Mapping[str, Any]) -> dict[str, int] | None:
    """Label name -> training rows, from `label_counts` of data_summary.json; None when it is not there."""
    counts = summary.get("label_counts")
    train = counts.get("train") if isinstance(counts, dict) else None
    if not isinstance(train, dict) or not all(isinstance(v, (int, float)) for v in train.values()):
        return None
    return {str(name): int(count) for name, count in train.items()}


def read_run_config(path: Path) -> dict[str, Any]:
    """The options in a run.yaml, each in its type; empty when the file is absent. Options of other versions are left out."""
    return resolve(read_entries(path).entries).values if os.path.lexists(path) else {}
