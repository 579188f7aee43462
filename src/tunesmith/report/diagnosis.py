"""The diagnosis of a run folder: its curves, its config and its label counts brought together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.config.load import read_entries, resolve
from tunesmith.diagnosis.features import Reading, read_curves
from tunesmith.diagnosis.verdict import judge_reading
from tunesmith.findings import Finding
from tunesmith.labels import Task
from tunesmith.runs.curves import Curves, load_curves
from tunesmith.runs.folder import RunDir, open_run, read_summary
from tunesmith.runs.lock import read_holder

TITLES = {
    "calibration_drift": "Calibration drifts",
    "no_signal": "Text without signal",
    "split_mismatch": "Splits do not match",
}
"""Verdicts whose title is not their code."""
TONES = {"info": "info", "warning": "warn", "error": "bad"}


def tone_and_title(finding: Finding) -> tuple[str, str]:
    """How the pages colour a verdict (good, info, warn, bad: by how serious it is) and name it."""
    tone = "good" if finding.code in ("healthy", "still_learning") else TONES[finding.severity]
    return tone, TITLES.get(finding.code, finding.code.replace("_", " ").capitalize())


def diagnose_run(run: str | Path | RunDir) -> list[Finding]:
    """Findings about a run folder, the verdict first."""
    folder = run if isinstance(run, RunDir) else open_run(run)
    curves = load_curves(folder.path)
    config, summary = read_run_config(folder.config_file), read_summary(folder.data_summary_file)
    return diagnose_with(curves, config, summary, running=is_in_training(folder, curves))


def is_in_training(run: RunDir, curves: Curves) -> bool:
    """Whether a process still trains this run: its journal has no end, and its lock is held."""
    return curves.ended is None and read_holder(run.lock_file) is not None


def diagnose_with(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], *, running: bool = False
) -> list[Finding]:
    """Findings from what was read already."""
    return judge_reading(read_with(curves, config, summary, running=running))


def read_with(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], *, running: bool = False
) -> Reading:
    """The curves with what data_summary.json knows. Class shares give a chance loss only where each row has one label."""
    single = summary.get("task") in (None, Task.BINARY, Task.MULTICLASS)
    names = tuple(summary.get("labels") or ()) if single else ()
    counts = (summary.get("label_counts") or {}).get("train")
    constant = ((summary.get("best_constant") or {}).get("metrics") or {}).get("loss")
    return read_curves(
        curves,
        config,
        label_counts=counts if single else None,
        num_labels=len(names) if len(names) >= 2 else None,
        label_names=names,
        floor=float(constant) if isinstance(constant, (int, float)) and 0 < constant < 1e30 else None,
        floors=_floors(summary),
        probe_rows=summary.get("probe_rows"),
        running=running,
    )


def _floors(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Scores of simpler models on the validation rows, from `floors` of data_summary.json: name -> metric -> value."""
    found: dict[str, dict[str, float]] = {}
    for name, scores in ((summary.get("floors") or {}).get("validation") or {}).items():
        values = {m: v.get("value") if isinstance(v, dict) else v for m, v in scores.items()}
        found[name] = {m: float(v) for m, v in values.items() if isinstance(v, (int, float))}
    return found


def read_run_config(path: Path) -> dict[str, Any]:
    """The options in a run.yaml, each in its type; empty when the file is absent. Options of other versions are left out."""
    return resolve(read_entries(path).entries).values if os.path.lexists(path) else {}
