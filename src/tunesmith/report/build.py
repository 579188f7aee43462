"""A run folder -> everything the report says, as plain data. What is absent is left out, never made up."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.config.schema import list_options
from tunesmith.curves.from_journal import load_curves
from tunesmith.curves.series import Curves
from tunesmith.findings import Finding
from tunesmith.labels import Task
from tunesmith.metrics.calibration import ReliabilityBin, expected_calibration_error, reliability_bins
from tunesmith.reading.prediction_file import read_prediction_columns
from tunesmith.report.diagnosis import diagnose_with, goes_on, read_run_config
from tunesmith.report.mistakes import Confusion, LabelCount, Mistake, count_confusions, count_labels, find_mistakes
from tunesmith.report.predictions import PredictedRows, make_predictions
from tunesmith.report.score_table import Headline, headline_scores
from tunesmith.report.slices import Slice, find_slices
from tunesmith.run.layout import RunDir, open_run
from tunesmith.run.records import read_environment, read_metrics, read_summary

TableRows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The numbers and words of one run."""

    name: str
    curves: Curves
    scores: list[Headline]
    findings: list[Finding]
    data_findings: list[Finding]
    """Warnings of the audit of the data."""
    facts: TableRows
    """(name, value): what was run."""
    splits: TableRows
    """(split, rows, labels, truncation)."""
    columns: TableRows
    notes: tuple[str, ...]
    """What reading and checking the data brought up."""
    split: str | None
    """The split the parts below are about."""
    rows: int
    confusion: Confusion | None
    bins: tuple[ReliabilityBin, ...]
    calibration_error: float | None
    label_counts: list[LabelCount]
    """Each label by itself where a row may have several."""
    mistakes: list[Mistake]
    wrong: int
    slices: list[Slice]
    changed: TableRows
    """(option, value) that differ from the defaults."""
    options: TableRows
    """All options."""
    environment: TableRows
    command: str
    absent: tuple[str, ...]
    """Files of the run folder that are not there."""


def build_report(run: str | Path | RunDir) -> Report:
    """Everything that can be said about the run folder."""
    folder = run if isinstance(run, RunDir) else open_run(run)
    config = read_run_config(folder.config_file)
    summary = read_summary(folder.data_summary_file)
    environment = read_environment(folder.environment_file)
    curves = load_curves(folder.path)
    predictions = make_predictions(read_prediction_columns(folder.predictions_file), summary)
    table, labels = _decisions(predictions)
    files = (
        folder.config_file,
        folder.environment_file,
        folder.metrics_file,
        folder.data_summary_file,
        folder.predictions_file,
    )
    return Report(
        name=str(config.get("run_name") or folder.name),
        curves=curves,
        scores=headline_scores(read_metrics(folder.metrics_file), predictions, curves),
        findings=diagnose_with(curves, config, summary, running=goes_on(folder, curves)),
        data_findings=_data_findings(summary),
        facts=_facts(curves, config, summary),
        splits=_splits(summary),
        columns=_columns(summary),
        notes=_notes(summary),
        split=predictions.split if predictions is not None else None,
        rows=len(predictions) if predictions is not None else 0,
        confusion=count_confusions(predictions) if predictions is not None else None,
        bins=reliability_bins(table, labels, num_bins=10) if table is not None else (),
        calibration_error=expected_calibration_error(table, labels) if table is not None else None,
        label_counts=count_labels(predictions) if predictions is not None else [],
        mistakes=find_mistakes(predictions) if predictions is not None else [],
        wrong=_count_wrong(predictions),
        slices=find_slices(predictions) if predictions is not None and predictions.names else [],
        changed=_options({k: v for k, v in config.items() if k in list_options() and v != list_options()[k].default}),
        options=_options(config),
        environment=_environment(environment),
        command=_command(environment, folder),
        absent=tuple(file.name for file in files if not file.is_file()),
    )


def _decisions(predictions: PredictedRows | None) -> tuple[Any, Any]:
    """(probabilities, right answers) of every decision: one a row, or one for each label of a row that may have several."""
    if predictions is None or predictions.probabilities is None:
        return None, None
    if predictions.task is not Task.MULTILABEL:
        return predictions.probabilities, predictions.labels
    yes = predictions.probabilities.ravel()
    return np.stack([1 - yes, yes], axis=1), predictions.labels.ravel()


def _count_wrong(predictions: PredictedRows | None) -> int:
    return int((~predictions.right).sum()) if predictions is not None and predictions.names else 0


def _facts(curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any]) -> TableRows:
    best = curves.best()
    speed = curves.tokens_per_second.finite().value
    epochs = curves.last_step / curves.steps_per_epoch if curves.steps_per_epoch else 0
    facts = {
        "model": config.get("model_name_or_path"),
        "task": summary.get("task"),
        "steps": f"{curves.last_step} of {curves.num_steps}" if curves.num_steps else curves.last_step,
        "epochs": f"{epochs:.3g}" if epochs else None,
        "training rows": curves.train_rows or None,
        "best step": f"{best[1]} ({best[0]} {best[2]:.4g})" if best else None,
        **_floors(summary),
        "speed": f"{sum(speed) / len(speed):,.0f} real tokens a second" if len(speed) else None,
        "resumed at": ", ".join(f"step {s}" for s in curves.resumed_at) or None,
        "not finite": f"{len(curves.non_finite)} steps, first {curves.non_finite[0]}" if curves.non_finite else None,
        "ended": curves.ended or "still running, or killed",
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def _floors(summary: Mapping[str, Any]) -> dict[str, str]:
    """By the name of a simpler model, its first score on each split: what the run has to be better than."""
    found: dict[str, list[str]] = {}
    for split, by_name in _mapping(summary, "floors").items():
        for name, scores in by_name.items():
            metric, score = next(iter(scores.items()), ("", None))
            if isinstance(score, dict) and isinstance(score.get("value"), (int, float)):
                shown = f"{split} {metric} {score['value']:.4f} (n={score.get('n')})"
                found.setdefault(f"floor: {name}", []).append(shown)
    return {name: ", ".join(parts) for name, parts in found.items()}


def _splits(summary: Mapping[str, Any]) -> TableRows:
    rows, counts, cuts = (_mapping(summary, key) for key in ("rows", "label_counts", "truncation"))
    found = []
    for split in dict.fromkeys([*rows, *counts, *cuts]):
        labels = _mapping(counts, split)
        total = sum(v for v in labels.values() if isinstance(v, (int, float))) or 1
        shown = sorted(labels.items(), key=lambda item: -item[1])[:12]
        words = ", ".join(f"{name} {count:,} ({count / total:.0%})" for name, count in shown)
        more = f", and {len(labels) - 12} more" if len(labels) > 12 else ""
        found.append((str(split), f"{rows.get(split, 0):,}", words + more, _truncation(_mapping(cuts, split))))
    return tuple(found)


def _truncation(cut: Mapping[str, Any]) -> str:
    if not cut:
        return "unknown"
    rows, of = cut.get("rows_cut", 0), cut.get("rows", 0)
    if not rows:
        return f"none (limit {cut.get('max_length', '?')} tokens)"
    share = f" ({rows / of:.1%})" if of else ""
    return f"{rows:,} rows{share} cut at {cut.get('max_length', '?')} tokens, {cut.get('tokens_cut', 0):,} tokens lost"


def _mapping(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _columns(summary: Mapping[str, Any]) -> TableRows:
    return tuple((str(k), _say(v)) for k, v in _mapping(summary, "columns").items())


def _notes(summary: Mapping[str, Any]) -> tuple[str, ...]:
    notes, findings = (v if isinstance(v := summary.get(key), list) else [] for key in ("notes", "findings"))
    found = [str(f["evidence"]) for f in findings if isinstance(f, dict) and f.get("evidence")]
    decided = [f"Recipe: {line}." for line in summary.get("recipe") or ()]
    return tuple(dict.fromkeys([*map(str, notes), *decided, *found]))[:40]


def _data_findings(summary: Mapping[str, Any]) -> list[Finding]:
    """The warnings about the data, as far as the file holds them whole."""
    found = summary.get("findings")
    texts = [f for f in found if isinstance(f, dict)] if isinstance(found, list) else []
    return [
        Finding(str(f["code"]), "warning", str(f["evidence"]), tuple(map(str, f.get("advice") or ())))
        for f in texts
        if f.get("severity") in ("warning", "error") and isinstance(f.get("code"), str) and f.get("evidence")
    ]


def _options(config: Mapping[str, Any]) -> TableRows:
    return tuple((name, _say(value)) for name, value in sorted(config.items()))


def _say(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _environment(environment: Mapping[str, Any]) -> TableRows:
    flat = {k: v for k, v in environment.items() if not isinstance(v, dict) and k != "command"}
    flat |= {name: version for name, version in _mapping(environment, "packages").items() if version}
    return tuple((str(k), _say(v)) for k, v in flat.items() if v is not None)


def _command(environment: Mapping[str, Any], folder: RunDir) -> str:
    words = environment.get("command")
    if isinstance(words, list) and words:
        return shlex.join(str(word) for word in words)
    return f"tunesmith train {shlex.quote(str(folder.config_file))}"
