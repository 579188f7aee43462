"""The diagnosis of a run folder: its curves, its config and its label counts brought together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.curves.build import load_curves
from tunesmith.curves.series import Curves
from tunesmith.diagnose.advise import diagnose
from tunesmith.findings import Finding
from tunesmith.labels import Task
from tunesmith.report.files import read_config
from tunesmith.run.layout import RunDir, open_run
from tunesmith.run.lock import read_holder
from tunesmith.run.records import read_summary


def diagnose_run(run: str | Path | RunDir) -> list[Finding]:
    """Findings about a run folder, the verdict first."""
    folder = run if isinstance(run, RunDir) else open_run(run)
    curves = load_curves(folder.path)
    config, summary = read_config(folder.config_file), read_summary(folder.data_summary_file)
    return diagnose_with(curves, config, summary, running=goes_on(folder, curves))


def goes_on(run: RunDir, curves: Curves) -> bool:
    """Whether a process is still at this run: its journal has no end, and its lock is held."""
    return curves.ended is None and read_holder(run.lock_file) is not None


def diagnose_with(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], *, running: bool = False
) -> list[Finding]:
    """Findings from what was read already. Only one label a row makes class shares a chance loss."""
    single = summary.get("task") in (None, Task.BINARY, Task.MULTICLASS)
    names = summary.get("labels") if single else None
    return diagnose(
        curves,
        config,
        label_counts=train_label_counts(summary) if single else None,
        num_labels=len(names) if isinstance(names, (list, tuple)) and len(names) >= 2 else None,
        running=running,
    )


def train_label_counts(summary: Mapping[str, Any]) -> dict[str, int] | None:
    """Label name -> training rows, from `label_counts` of data_summary.json; None when it is not there."""
    counts = summary.get("label_counts")
    train = counts.get("train") if isinstance(counts, dict) else None
    if not isinstance(train, dict) or not all(isinstance(v, (int, float)) for v in train.values()):
        return None
    return {str(name): int(count) for name, count in train.items()}
