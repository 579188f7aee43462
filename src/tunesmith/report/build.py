"""Read everything that the report shows from a run folder, as plain data. Missing files are omitted."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.load import read_entries, resolve
from tunesmith.config.options import list_options
from tunesmith.data.rows import read_prediction_columns
from tunesmith.diagnosis.reading import Reading, read_curves
from tunesmith.diagnosis.verdict import judge_reading
from tunesmith.events import Finding
from tunesmith.files import write_file
from tunesmith.labels import Task
from tunesmith.metrics.calibration import LabelNoise
from tunesmith.report.plots import (
    Chart,
    Explained,
    coverage_chart,
    explain_rows,
    make_charts,
    overlay_charts,
    reliability_chart,
    value_chart,
)
from tunesmith.report.predictions import (
    Headline,
    ScoreGrid,
    choose_headline,
    headline_scores,
    make_grid,
    make_predictions,
    scores_in_file,
)
from tunesmith.runs.event_log import Curves
from tunesmith.runs.folder import (
    RunDir,
    load_curves,
    open_run,
    read_environment,
    read_holder,
    read_metrics,
    read_summary,
)

if TYPE_CHECKING:
    from tunesmith.report.compare import Comparison


TONES = {"info": "info", "warning": "warn", "error": "bad"}


def tone_and_title(finding: Finding) -> tuple[str, str]:
    """Return the color (good, info, warn, bad) and the title of a verdict."""
    tone = "good" if finding.code in ("healthy", "still_learning") else TONES[finding.severity]
    return tone, finding.code.replace("_", " ").capitalize()


def diagnose_run(run: str | Path | RunDir, curves: Curves | None = None) -> list[Finding]:
    """Return findings about a run folder, the verdict first; reads its event log unless `curves` are passed."""
    folder = run if isinstance(run, RunDir) else open_run(run)
    curves = curves or load_curves(folder.path)
    config, summary = read_run_config(folder.config_file), read_summary(folder.data_summary_file)
    running = curves.ended is None and read_holder(folder.lock_file) is not None
    return diagnose_with(curves, config, summary, running=running)


def diagnose_with(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], *, running: bool = False
) -> list[Finding]:
    """Return findings from data that was already read."""
    return judge_reading(read_with(curves, config, summary, running=running))


def read_with(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], *, running: bool = False
) -> Reading:
    """Return the curves with facts from data_summary.json. Class frequencies imply a chance loss only for single labels."""
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
        constant_loss=float(constant) if isinstance(constant, (int, float)) and 0 < constant < 1e30 else None,
        baselines={
            name: {score.name: score.value for score in scores if score.split == "validation"}
            for name, scores in baseline_scores({}, summary).items()
        },
        probe_rows=summary.get("probe_rows"),
        label_noise=summary.get("label_noise"),
        running=running,
    )


def read_run_config(path: Path) -> dict[str, Any]:
    """Return the options of a run.yaml; empty if there is none. Options of other versions are ignored."""
    return resolve(read_entries(path)[0]).values if os.path.lexists(path) else {}


TableRows = tuple[tuple[str, ...], ...]
SEVERITIES = ("error", "warning")
"""Severities of data findings at the top of the page, the worst first."""


def run_facts(
    curves: Curves, config: Mapping[str, Any], summary: Mapping[str, Any], environment: Mapping[str, Any]
) -> TableRows:
    """(name, value): model, time, machine, steps, as far as they are known."""
    best, noise = curves.best(), LabelNoise.from_json(summary.get("label_noise"))
    speed = curves.tokens_per_second.finite().value
    epochs = curves.last_step / curves.steps_per_epoch if curves.steps_per_epoch else 0
    facts = {
        "model": config.get("model_name_or_path"),
        "task": summary.get("task"),
        "started": say_date(curves.times[0]),
        "duration": _duration(curves),
        "machine": _machine(environment),
        "training rows": f"{curves.train_rows:,}" if curves.train_rows else None,
        "steps": f"{curves.last_step:,} of {curves.num_steps:,}" if curves.num_steps else curves.last_step,
        "epochs": f"{epochs:.3g}" if epochs else None,
        "best step": f"{best[1]:,} ({best[0]} {best[2]:.4g})" if best else None,
        "speed": f"{sum(speed) / len(speed):,.0f} tokens per second" if len(speed) else None,
        "resumed at": ", ".join(f"step {s:,}" for s in curves.resumed_at) or None,
        "wrong labels": f"about {noise.text()}" if noise is not None and noise.is_precise else None,
        "ended": curves.ended or "still running, or killed",
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def say_date(seconds: float) -> str | None:
    """`17 November 2026, 06:53 UTC`; None without a time, or for one outside the calendar."""
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{when.day} {when:%B %Y, %H:%M} UTC" if seconds > 0 else None


def _duration(curves: Curves) -> str | None:
    seconds = round(curves.times[1] - curves.times[0])
    if curves.times[0] <= 0 or not 0 < seconds < 1e9:
        return None
    minutes, hours = divmod(seconds, 60)[0], seconds // 3600
    shown = f"{seconds} s" if minutes < 1 else f"{minutes} min {seconds % 60} s"
    if hours:
        shown = f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
    return f"{shown}, including interruptions" if curves.resumed_at else shown


def _machine(environment: Mapping[str, Any]) -> str | None:
    device, cpus = environment.get("device"), environment.get("cpus")
    system = str(environment.get("platform") or "").split("-")[0]
    parts = (device, environment.get("gpu"), f"{cpus} cores" if cpus else None, system, environment.get("machine"))
    return ", ".join(str(part) for part in parts if part) or None


def baseline_scores(metrics: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, list[Headline]]:
    """Return the scores of each baseline."""
    found: dict[str, list[Headline]] = {}
    baselines = metrics.get("baselines")  # unlike those of the summary, not checked when they are read
    for split, by_name in (
        baselines if isinstance(baselines, dict) and baselines else summary.get("baselines") or {}
    ).items():
        for name, scores in (by_name if isinstance(by_name, dict) else {}).items():
            found.setdefault(str(name), []).extend(scores_in_file({str(split): scores}))
    return found


def split_facts(summary: Mapping[str, Any]) -> TableRows:
    """(split, rows, labels, truncation)."""
    rows, counts, cuts = (summary.get(key) or {} for key in ("rows", "label_counts", "truncation"))
    found = []
    for split in dict.fromkeys([*rows, *counts, *cuts]):
        labels = counts.get(split, {})
        total = sum(labels.values()) or 1
        shown = sorted(labels.items(), key=lambda item: -item[1])[:12]
        words = ", ".join(f"{name} {count:,} ({count / total:.0%})" for name, count in shown) or "–"
        more = f", and {len(labels) - 12} more" if len(labels) > 12 else ""
        found.append((split, f"{rows.get(split, 0):,}", words + more, _truncation(cuts.get(split, {}))))
    return tuple(found)


def _truncation(cut: Mapping[str, Any]) -> str:
    if not cut:
        return "unknown"
    rows, of = cut.get("rows_cut") or 0, cut.get("rows") or 0
    if not rows:
        return f"none (limit {cut.get('max_length', '?')} tokens)"
    share = f" ({rows / of:.1%})" if of else ""
    shown = f"{rows:,} row{'s' * (rows != 1)}{share} truncated to {cut.get('max_length', '?')} tokens"
    return f"{shown}, {cut.get('tokens_cut') or 0:,} tokens lost"


def data_notes(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes about the data, without the warnings, which are shown at the top."""
    found = [str(f["evidence"]) for f in summary.get("findings") or () if f.get("evidence")]
    above = {finding.evidence for finding in data_findings(summary)}
    return tuple(text for text in dict.fromkeys([*(summary.get("notes") or ()), *found]) if text not in above)[:40]


def data_findings(summary: Mapping[str, Any]) -> list[Finding]:
    """Return errors and warnings about the data, the worst first."""
    found = [f for f in summary.get("findings") or () if f.get("severity") in SEVERITIES and f.get("evidence")]
    made = [
        Finding(f["code"], f["severity"], str(f["evidence"]), tuple(map(str, f.get("advice") or ())))
        for f in found
        if isinstance(f.get("code"), str) and isinstance(f.get("advice") or (), (list, tuple))
    ]
    return sorted(made, key=lambda finding: SEVERITIES.index(finding.severity))


def say_value(value: Any) -> str:
    """Return the value of an option as text."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def environment_facts(environment: Mapping[str, Any]) -> TableRows:
    """(name, value): machine and versions."""
    flat = {k: v for k, v in environment.items() if not isinstance(v, dict) and k != "command"}
    flat |= {name: version for name, version in (environment.get("packages") or {}).items() if version}
    return tuple((str(k), say_value(v)) for k, v in flat.items() if v is not None)


def command_again(environment: Mapping[str, Any], folder: RunDir) -> str:
    """Return the command line that makes the run again."""
    words = environment.get("command")
    if words:
        return shlex.join(["tunesmith" if words[0] == "__main__.py" else words[0], *words[1:]])
    return f"tunesmith train {shlex.quote(str(folder.config_file))}"


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The numbers and words of one run."""

    name: str
    curves: Curves
    scores: list[Headline]
    headline: Headline | None
    """The one score to read first."""
    baselines: dict[str, list[Headline]]
    """Scores of simpler models, by their name."""
    findings: list[Finding]
    data_findings: list[Finding]
    """Warnings of the audit of the data."""
    facts: TableRows
    """(name, value): what was run."""
    splits: TableRows
    """(split, rows, labels, truncation)."""
    notes: tuple[str, ...]
    """Notes from reading and checking the data."""
    decisions: tuple[str, ...]
    """The choices of the recipe, with reasons."""
    explained: Explained | None
    """The examples of the test or validation split; None without labeled predictions."""
    changed: TableRows
    """(option, value) that differ from the defaults."""
    environment: TableRows
    command: str


def build_report(run: str | Path | RunDir) -> Report:
    """Return everything that the report shows about a run folder."""
    folder = run if isinstance(run, RunDir) else open_run(run)
    config = read_run_config(folder.config_file)
    summary = read_summary(folder.data_summary_file)
    environment = read_environment(folder.environment_file)
    curves = load_curves(folder.path)
    predictions = make_predictions(read_prediction_columns(folder.predictions_file), summary)
    metrics = read_metrics(folder.metrics_file)
    scores = headline_scores(metrics, curves)
    return Report(
        name=str(config.get("run_name") or folder.name),
        curves=curves,
        scores=scores,
        headline=choose_headline(scores, curves),
        baselines=baseline_scores(metrics, summary),
        findings=diagnose_run(folder, curves),
        data_findings=data_findings(summary),
        facts=run_facts(curves, config, summary, environment),
        splits=split_facts(summary),
        notes=data_notes(summary),
        decisions=tuple(summary.get("recipe") or ()),
        explained=explain_rows(predictions) if predictions is not None else None,
        changed=tuple(
            (name, say_value(value))
            for name, value in sorted(config.items())
            if name in list_options() and value != list_options()[name].default
        ),
        environment=environment_facts(environment),
        command=command_again(environment, folder),
    )


# --- the page ---------------------------------------------------------------------------------------------------------

# Report or Comparison -> one HTML file that needs nothing else: no server, no network, no script but its own. Every
# text goes through the template's autoescape. The policy in the page allows exactly one script and one style sheet, by
# their hashes, and pictures in data addresses: should a text ever reach the page unescaped, it still cannot run or
# load.

TEXT_LIMIT = 700
"""Characters of a misclassified text that are visible; the rest can be unfolded."""


def write_report(report: Report, path: Path) -> Path:
    """Write the page atomically and return its path."""
    write_file(path, render_report(report).encode("utf-8", "backslashreplace"))
    return path


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page atomically and return its path."""
    write_file(path, render_comparison(comparison).encode("utf-8", "backslashreplace"))
    return path


def render_report(report: Report) -> str:
    """Return the page of a run."""
    charts, more = make_charts(report.curves)
    rows, grid = report.explained, make_grid(report.scores)
    reliability = reliability_chart(rows.bins) if rows and rows.bins else None
    coverage = coverage_chart(rows.coverage) if rows and rows.coverage else None
    return _render(
        "page.html.j2",
        page_asset("page.css"),
        [*charts, *more, *(chart for chart in (reliability, coverage) if chart is not None)],
        r=report,
        charts=charts,
        more=more,
        reliability=reliability,
        coverage=coverage,
        values=value_chart(*rows.values) if rows and rows.values else None,
        grid=grid,
        counts={s: next((one.n for one in report.scores if one.split == s and one.n), None) for s in grid.splits},
        baselines=_baseline_rows(report, grid),
        heat=_heat(report),
        text_limit=TEXT_LIMIT,
    )


def render_comparison(comparison: Comparison) -> str:
    """Return the page of several runs."""
    charts = overlay_charts([run.curves for run in comparison.runs])
    style = page_asset("page.css") + page_asset("compare.css")
    return _render("compare.html.j2", style, charts, c=comparison, charts=charts)


def _render(template: str, style: str, drawn: Sequence[Chart], **content: Any) -> str:
    script = page_asset("page.js")
    page = page_template(template).render(
        tone_and_title=tone_and_title,
        style=style,
        script=script,
        policy=content_policy(style, script),
        data=embed_json({chart.key: chart.data for chart in drawn}),
        **content,
    )
    return str(page)


def content_policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy of the page."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def embed_json(data: Any) -> str:
    """Return JSON for a <script> element: no text in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


@cache
def page_asset(name: str) -> str:
    """Return the text of a style, a script or a template."""
    return (files("tunesmith.report") / name).read_text(encoding="utf-8")


@cache
def page_template(name: str) -> Any:
    """Return a template that escapes every value; an unknown name in it is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(page_asset),
    )
    environment.filters |= {"score": score_text, "title_of": score_title}
    return environment.get_template(name)


def score_text(value: float) -> str:
    """Three decimals, or four digits of a large number."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def score_title(name: str) -> str:
    """Return the name of a score as a heading."""
    if name in ("auroc", "mse", "rmse", "mae", "ece", "f1"):
        return name.upper()
    name = {"r2": "R²", "spearmanr": "spearman", "roc_auc": "AUROC"}.get(name, name)
    return name[:1].upper() + name[1:].replace("_", " ")


def _baseline_rows(report: Report, grid: ScoreGrid) -> list[tuple[str, list[Headline | None]]]:
    """Simpler models by the headline's metric, a score for each split of the grid."""
    lead, found = report.headline, []
    for name, scores in report.baselines.items() if lead else ():
        own = {score.split: score for score in scores if lead and (score.name, score.of) == (lead.name, lead.of)}
        if own:
            found.append((name, [own.get(split) for split in grid.splits]))
    return found


def _heat(report: Report) -> list[list[tuple[int, int, str]]]:
    """Confusion matrix cells: (rows, shade 0 to 5 by share of the true label, share in words)."""
    counts = report.explained.confusion.counts if report.explained and report.explained.confusion else ()
    cells = []
    for row in counts:
        total = sum(row) or 1
        cells.append([(n, round(5 * n / total), f"{n / total:.0%}") for n in row])
    return cells
