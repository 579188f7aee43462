"""A run folder -> everything the report says, as plain data. What is absent is left out, never made up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunesmith.config.schema import list_options
from tunesmith.curves.series import Curves, load_curves
from tunesmith.findings import Finding
from tunesmith.reading.prediction_file import read_prediction_columns
from tunesmith.report.diagnosis import diagnose_with, goes_on, read_run_config
from tunesmith.report.explained import Explained, explain_rows
from tunesmith.report.particulars import (
    TableRows,
    column_facts,
    command_again,
    data_findings,
    data_notes,
    environment_facts,
    floor_scores,
    option_facts,
    run_facts,
    split_facts,
)
from tunesmith.report.predictions import make_predictions
from tunesmith.report.score_table import Headline, choose_headline, headline_scores
from tunesmith.run.layout import RunDir, open_run, read_environment, read_metrics, read_summary


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The numbers and words of one run."""

    name: str
    curves: Curves
    scores: list[Headline]
    headline: Headline | None
    """The one score to read first."""
    floors: dict[str, list[Headline]]
    """Scores of simpler models, by their name."""
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
    decisions: tuple[str, ...]
    """What the recipe chose, with reasons."""
    explained: Explained | None
    """The rows of the test split, or of the validation split; None without labelled predictions."""
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
    metrics = read_metrics(folder.metrics_file)
    scores = headline_scores(metrics, predictions, curves)
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
        scores=scores,
        headline=choose_headline(scores, curves),
        floors=floor_scores(metrics, summary),
        findings=diagnose_with(curves, config, summary, running=goes_on(folder, curves)),
        data_findings=data_findings(summary),
        facts=run_facts(curves, config, summary, environment),
        splits=split_facts(summary),
        columns=column_facts(summary),
        notes=data_notes(summary),
        decisions=tuple(map(str, summary.get("recipe") or ())),
        explained=explain_rows(predictions) if predictions is not None else None,
        changed=option_facts(
            {k: v for k, v in config.items() if k in list_options() and v != list_options()[k].default}
        ),
        options=option_facts(config),
        environment=environment_facts(environment),
        command=command_again(environment, folder),
        absent=tuple(file.name for file in files if not file.is_file()),
    )
