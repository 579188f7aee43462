"""The pages of a run: curves, report and model card. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunesmith.config.schema import dump_value
from tunesmith.labels import Task
from tunesmith.report.build import build_report
from tunesmith.report.plots import curve_pictures, write_curves
from tunesmith.report.render import write_report
from tunesmith.runs.folder import RunDir

if TYPE_CHECKING:
    from tunesmith.pipeline.finish import Scores
    from tunesmith.pipeline.prepare import Prepared


def draw_and_explain(run: RunDir) -> list[str]:
    """Writes curves and the report; returns the diagnosis in lines."""
    report = build_report(run)
    write_curves(curve_pictures(report.curves), png=run.curves_png, svg=run.curves_svg)
    write_report(report, run.report_file)
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.code}{finding.doubt}: {finding.evidence}")
        lines += [f"  - {advice}" for advice in finding.advice]
    return lines


SHOWN_OPTION_NAMES = """
    learning_rate lr_scheduler_type warmup_steps per_device_train_batch_size gradient_accumulation_steps num_train_epochs
    max_steps weight_decay max_grad_norm label_smoothing_factor adversarial class_weights seed
"""
SHOWN_LABELS = 8


def write_card(prepared: Prepared, scores: Scores, *, name: str, steps: int, best_step: int | None) -> str:
    """The model card: what the model is, how good it is and how sure that is, how it was made. Markdown with the metadata
    block that the Hub reads."""
    base = prepared.config.model_name_or_path or "all-MiniLM-L6-v2"
    bundle = prepared.bundle
    names = ", ".join(f"`{n}`" for n in bundle.labels.names[:20])
    what = {Task.REGRESSION: "a number", Task.MULTILABEL: f"any of {names}"}.get(bundle.labels.task, f"one of {names}")
    columns = " and ".join(f"`{c}`" for c in bundle.columns.text)
    pair = ', "text_pair": "..."' if len(bundle.columns.text) == 2 else ""
    lines = ["---", *_metadata(prepared, scores, name, str(base)), "---", "", f"# {_escape(name)}", ""]
    lines += [f"`{base}` fine-tuned by tunesmith to read {columns} and predict {what}.", ""]
    lines += ["## Scores", "", "| split | metric | value | 95% interval | rows |", "|---|---|---|---|---|"]
    for split, found in scores.items():
        for metric, score in found.items():
            value = "undefined" if score.value is None else f"{score.value:.4f}"
            interval = "" if score.low is None or score.high is None else f"{score.low:.4f} to {score.high:.4f}"
            lines.append(f"| {split} | {_escape(score.title(metric))} | {value} | {interval} | {score.n} |")
    lines += ["", "## Training", "", f"{steps} steps; weights of step {best_step or steps}.", ""]
    options = {option: str(getattr(prepared.config, option)) for option in SHOWN_OPTION_NAMES.split()}
    lines += ["| option | value |", "|---|---|", *(f"| {k} | {_escape(v)} |" for k, v in options.items())]
    lines += ["", "## Data", "", *_data_table(prepared), "", *(f"- {_escape(note)}" for note in bundle.notes)]
    limits = LIMITS.format(length=prepared.facts.max_length)
    return "\n".join([*lines, "", "## Limits", "", limits, "## Use", "", USE.format(pair=pair)])


LIMITS = """\
- It reads {length} tokens of a row at a time; `long_texts` says how it reads longer ones.
- The scores hold for rows like these; texts of another kind, language or length were not measured.
- The probabilities are the model's own: they were not calibrated, unless a line under Data says so.
- The intervals cover the choice of the rows, not of the seed: another seed may move the score as much.
"""
USE = """\
```python
from transformers import pipeline

classify = pipeline("text-classification", "model")
classify({{"text": "..."{pair}}})
```
"""


def _metadata(prepared: Prepared, scores: Scores, name: str, base: str) -> list[str]:
    lines = ["library_name: transformers", "pipeline_tag: text-classification", "tags:", "- tunesmith"]
    if "/" in base and not base.startswith((".", "/")):
        lines.append(f"base_model: {dump_value(base)}")
    split = "test" if "test" in scores else next(iter(scores), None)
    if split is None:
        return lines
    lines += ["model-index:", f"- name: {dump_value(name)}", "  results:"]
    lines += ["  - task: {type: text-classification, name: Text Classification}"]
    data = prepared.config.task_name or prepared.config.dataset_name or "custom"
    lines += [
        f"    dataset: {{name: {dump_value(str(data))}, type: {dump_value(str(data))}, split: {split}}}",
        "    metrics:",
    ]
    for metric, score in scores[split].items():
        if score.value is not None:
            lines.append(f"    - {{type: {metric}, value: {score.value:.6f}, name: {metric}}}")
    return lines


def _data_table(prepared: Prepared) -> list[str]:
    lines = ["| split | rows | labels | tokens: median, longest | rows cut |", "|---|---|---|---|---|"]
    for split, tokenized in prepared.tokenized.items():
        lengths = tokenized.rows.lengths
        tokens = f"{np.median(lengths):.0f}, {lengths.max()}" if len(lengths) else ""
        shares = _escape(_shares(prepared, split))
        lines.append(f"| {split} | {len(lengths):,} | {shares} | {tokens} | {tokenized.truncated.rows_cut:,} |")
    return lines


def _shares(prepared: Prepared, split: str) -> str:
    """Shares of the most frequent labels, or the range of a regression."""
    labels, names = prepared.rows(split).labels, prepared.bundle.labels.names
    if labels is None:
        return "none"
    if prepared.bundle.labels.task is Task.REGRESSION:
        known = labels[np.isfinite(labels)]
        return f"{known.min():g} to {known.max():g}, mean {known.mean():.3g}" if len(known) else "none"
    shares = labels.mean(axis=0) if labels.ndim == 2 else np.array([(labels == i).mean() for i in range(len(names))])
    order = np.argsort(-shares, kind="stable")[:SHOWN_LABELS]
    more = f" and {len(names) - SHOWN_LABELS} more" if len(names) > SHOWN_LABELS else ""
    return ", ".join(f"{names[i]} {shares[i]:.1%}" for i in order) + more


def _escape(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
