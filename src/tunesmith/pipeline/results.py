"""After the last step: best weights, scores with intervals, predictions, model folder, curves, diagnosis and report; and
`RunResult`, the return value of `finetune`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.config.options import dump_config
from tunesmith.data.batches import Collate, TokenRows
from tunesmith.errors import DataError
from tunesmith.events import Event, RowsEvaluated, describe_findings
from tunesmith.files import hash_file, replacing, write_file
from tunesmith.inference.model_folder import describe_model, export_model
from tunesmith.inference.tables import fill_table, names_of_run, predicted_names, probabilities_of
from tunesmith.labels import Task, choose_labels
from tunesmith.metrics.calibration import FEWEST_OF_A_LABEL, HeldOut, fit_thresholds
from tunesmith.metrics.evidence import describe_constant, encode_rows, keep_rows, rows_to_keep
from tunesmith.metrics.table import Score
from tunesmith.pipeline.prepare import Prepared
from tunesmith.pipeline.train import Log, RunEnding, ShowProgress, make_counter
from tunesmith.report.build import build_report, write_report
from tunesmith.report.plots import write_curves
from tunesmith.runs.folder import RESULTS, RunDir, describe_environment
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.evaluation import Predictions, predict_rows

if TYPE_CHECKING:
    from tunesmith.inference.predictor import Predictor
    from tunesmith.training.run_writer import RunWriter
    from tunesmith.training.state import TrainState


Scores = dict[str, dict[str, Score]]
MOST_PREDICTIONS = 200_000
"""Maximum number of rows per split in predictions.parquet."""


class Evaluation:
    """Evaluates the validation split and a sample of the training examples; a run calls it whenever one is due.

    `predictions` has those for the validation split at the last step and at the best one, by step.
    """

    def __init__(self, prepared: Prepared, progress: ShowProgress, writer: RunWriter) -> None:
        self.prepared, self.progress, self.writer = prepared, progress, writer
        self.predictions: dict[int, Predictions] = {}
        self.splits = {"validation": prepared.rows("validation")}
        sample = prepared.train_sample()
        if sample is not None:
            self.splits["train_sample"] = sample
        self._constant = prepared.constant()
        self._rows_to_keep = rows_to_keep(writer.plan.evaluate.count(writer.plan.num_steps))

    def __call__(self, state: TrainState) -> dict[str, tuple[dict[str, float | None], int]]:
        """Return metrics and number of examples of each split; pass the predictions to the event log."""
        prepared, events = self.prepared, list[Event]()
        found: dict[str, tuple[dict[str, float | None], int]] = {}
        count = make_counter(self.progress, "evaluating", sum(map(len, self.splits.values())))

        def after_batch(rows: int) -> None:
            if state.runtime.world == 1:  # several ranks would have to agree after each batch
                self.writer.stop.interrupt()
            count(rows)

        with prepared.speedups.whole():
            for name, rows in self.splits.items():
                result = _predict(prepared, rows, prepared.speedups.collate, after_batch)
                metrics = prepared.suite.compute(result.logits, result.labels)
                found[name] = ({"loss": result.loss, **metrics}, len(rows))
                if result.labels is not None:
                    kept = keep_rows(self._constant, result.logits, result.labels, self._rows_to_keep)
                    events += [] if kept is None else [RowsEvaluated(state.step, name, encode_rows(kept))]
                if name == "validation":
                    best = state.progress.step
                    self.predictions = {step: p for step, p in self.predictions.items() if step == best}
                    self.predictions[state.step] = result
        if state.runtime.is_main:
            for event in events:
                self.writer.on(event)
        return found


def _predict(prepared: Prepared, rows: TokenRows, collate: Collate, on_batch: Callable[[int], None]) -> Predictions:
    state, on_gpu = prepared.state, prepared.runtime.device.type == "cuda"
    most = None if on_gpu else max(prepared.config.per_device_eval_batch_size, 64)  # None: tokens are counted instead
    return predict_rows(
        state.model, rows, collate, prepared.runtime, max_rows=most, objective=state.objective, on_batch=on_batch
    )


def predict_splits(
    prepared: Prepared, progress: ShowProgress, validation: Predictions | None = None
) -> dict[str, Predictions]:
    """Return predictions of every split except train; `validation` if they are known already."""
    config = prepared.config
    found: dict[str, Predictions] = {} if validation is None else {"validation": validation}
    left = {split: part.rows for split, part in prepared.tokenized.items() if split not in ("train", *found)}
    if not left:
        return found
    wrong = prepared.speedups.dropped
    speedups = apply_speedups(
        prepared.state.model,
        None,
        prepared.padding,
        device=prepared.runtime.device,
        pack_rows="off" if "padding_free" in wrong else config.padding_free,
        first_token_only="off" if "cls_only_last_layer" in wrong else config.cls_only_last_layer,
        precision=prepared.runtime.precision,
        fused_layers="off" if "fused_layers" in wrong else config.fused_layers,
        cuda_graphs="off",
    )
    for split, rows in left.items():
        found[split] = _predict(
            prepared, rows, speedups.collate, make_counter(progress, f"evaluating {split}", len(rows))
        )
    speedups.close()
    return found


def score_splits(prepared: Prepared, predictions: dict[str, Predictions]) -> Scores:
    """Return each metric with n and its 95% interval, for labeled splits."""
    scores: Scores = {}
    for split, result in predictions.items():
        if result.labels is None or result.loss is None:
            continue
        scores[split] = prepared.suite.compute_with_intervals(result.logits, result.labels)
        scores[split]["loss"] = Score(result.loss, None, None, next(iter(scores[split].values())).n, "mean")
    return scores


def move_thresholds(prepared: Prepared, predictions: dict[str, Predictions], log: Log) -> Prepared:
    """Fit thresholds to the validation rows; return the run with them if they are better."""
    result, labels = predictions.get("validation"), prepared.bundle.labels
    if not prepared.config.move_thresholds or result is None or result.labels is None:
        return prepared
    found = fit_thresholds(probabilities_of(result.logits, labels.task), result.labels, labels.task)
    if found is None:
        log(f"Thresholds stay at one half: a label has fewer than {FEWEST_OF_A_LABEL} validation rows.")
        return prepared
    log(found.line())
    return with_thresholds(prepared, found.thresholds)


def with_thresholds(prepared: Prepared, thresholds: tuple[float, ...] | None) -> Prepared:
    """Return the run with these thresholds."""
    labels, suite = replace(prepared.bundle.labels, thresholds=thresholds), copy(prepared.suite)
    suite.thresholds = thresholds
    facts, bundle = replace(prepared.facts, labels=labels), replace(prepared.bundle, labels=labels)
    return replace(prepared, facts=facts, bundle=bundle, suite=suite)


def with_ending(run: RunDir, prepared: Prepared, ending: RunEnding) -> Prepared:
    """Return the run with the thresholds and lines of an ending, also in data_summary.json."""
    if ending.thresholds is not None:
        prepared = with_thresholds(prepared, ending.thresholds)
    if ending.lines:
        bundle = replace(prepared.bundle, notes=(*prepared.bundle.notes, *ending.lines))
        settled = replace(prepared.settled, reasons=(*prepared.settled.reasons, *ending.lines))
        prepared = replace(prepared, bundle=bundle, settled=settled)
        if prepared.runtime.is_main:
            write_data_summary(run, prepared)
    return prepared


def write_results(run: RunDir, prepared: Prepared, predictions: dict[str, Predictions], scores: Scores) -> None:
    """Write metrics.json and predictions.parquet."""
    table: dict[str, Any] = {s: {name: score.to_json() for name, score in found.items()} for s, found in scores.items()}
    if prepared.settled.baselines:
        table["baselines"] = prepared.settled.baselines
    write_file(run.metrics_file, json.dumps(table, indent=1).encode())
    if predictions:
        with replacing(run.predictions_file) as out:
            fill_table(out, ".parquet", _prediction_columns(prepared, predictions))


def write_start(run: RunDir, prepared: Prepared) -> None:
    """Write run.yaml, the environment and data_summary.json."""
    write_file(run.config_file, dump_config(prepared.config).encode())
    environment = {"run_id": prepared.identity.run_id, "device": str(prepared.runtime.device), **describe_environment()}
    write_file(run.environment_file, json.dumps(environment, indent=1).encode())
    write_data_summary(run, prepared)


def write_data_summary(run: RunDir, prepared: Prepared) -> None:
    """Write data_summary.json: rows, labels, columns, truncation and findings."""
    bundle = prepared.bundle
    if bundle.bad_rows:
        lines = [json.dumps(row.to_json(), ensure_ascii=False, default=str) for row in bundle.bad_rows]
        write_file(run.bad_rows_file, "\n".join([*lines, ""]).encode())
    summary = {
        "task": bundle.labels.task.value,
        "labels": list(bundle.labels.names),
        "columns": {"text": list(bundle.columns.text), "label": bundle.columns.label},
        "prediction_columns": {k: v for k, v in names_of_run(bundle.columns.text, bundle.labels).items() if k != v},
        "rows": {split: len(dataset) for split, dataset in bundle.splits.items()},
        "label_counts": {s: _label_counts(prepared, t.rows.labels) for s, t in prepared.tokenized.items()},
        "truncation": {split: asdict(t.truncated) for split, t in prepared.tokenized.items()},
        "bad_rows": len(bundle.bad_rows),
        "notes": list(bundle.notes),
        "findings": [f.to_json() for f in bundle.findings],
        "best_constant": _best_constant(prepared),
        "fingerprint": bundle.fingerprint,
        "gold": bundle.gold,
        "recipe": list(prepared.settled.reasons),
        "baselines": prepared.settled.baselines,
        "probe_rows": prepared.settled.probe_rows,
        "label_noise": prepared.settled.label_noise.to_json() if prepared.settled.label_noise else None,
    }
    write_file(run.data_summary_file, json.dumps(summary, indent=1, ensure_ascii=False).encode())


def _best_constant(prepared: Prepared) -> dict[str, Any]:
    """Return the scores of the constant baseline on the validation rows."""
    labels = prepared.rows("validation").labels if "validation" in prepared.tokenized else None
    if labels is None:
        return {}
    return describe_constant(prepared.constant(), labels, prepared.suite)


def _label_counts(prepared: Prepared, labels: npt.NDArray[Any] | None) -> dict[str, int]:
    task, names = prepared.bundle.labels.task, prepared.bundle.labels.names
    if labels is None or task is Task.REGRESSION:
        return {}
    if task is Task.MULTILABEL:
        return {n: int(c) for n, c in zip(names, labels.sum(axis=0), strict=True)}
    counts = np.bincount(labels[labels >= 0], minlength=len(names))
    return {n: int(c) for n, c in zip(names, counts, strict=True)}


def _prediction_columns(prepared: Prepared, predictions: dict[str, Predictions]) -> dict[str, list[Any]]:
    labels = prepared.bundle.labels
    columns: dict[str, list[Any]] = {"split": [], "row": [], "file": [], "line": []}
    texts: dict[str, list[Any]] = {name: [] for name in prepared.bundle.columns.text}
    gold: list[Any] = []
    predicted: list[Any] = []
    cut: list[bool] = []
    tables = []
    for split, result in predictions.items():
        dataset = prepared.bundle.splits[split]
        n = min(len(dataset), MOST_PREDICTIONS)
        some = dataset.select(range(n))
        columns["split"] += [split] * n
        columns["row"] += list(range(n))
        part = prepared.bundle.parts[split]
        columns["file"] += [part.source.origin] * n
        columns["line"] += part.line_numbers(n)
        for name, values in texts.items():
            values += list(some[name])
        probabilities = probabilities_of(result.logits[:n], labels.task)
        gold += _gold(result.labels, n, prepared)
        predicted += predicted_names(probabilities, labels)
        cut += (prepared.tokenized[split].cut[:n] > 0).tolist()
        tables.append(probabilities)
    own = {"label": gold, "prediction": predicted, "truncated": cut}
    if labels.task is not Task.REGRESSION:
        stacked = np.concatenate(tables)
        own |= {f"prob_{name}": stacked[:, i].tolist() for i, name in enumerate(labels.names)}
    names = names_of_run(prepared.bundle.columns.text, labels)
    return {names[k]: v for k, v in columns.items()} | texts | {names[k]: v for k, v in own.items()}


def _gold(labels: npt.NDArray[Any] | None, n: int, prepared: Prepared) -> list[Any]:
    names, task = prepared.bundle.labels.names, prepared.bundle.labels.task
    if labels is None:
        return [None] * n
    if task is Task.REGRESSION:
        return [None if np.isnan(v) else float(v) for v in labels[:n]]
    if task is Task.MULTILABEL:
        return [[names[i] for i in np.flatnonzero(row > 0.5)] for row in labels[:n]]
    return [names[i] if i >= 0 else None for i in labels[:n]]


def held_out_examples(prepared: Prepared, predictions: dict[str, Predictions]) -> HeldOut | None:
    """Return confidence and correctness of the validation examples; None unless each example has one class."""
    result, labels = predictions.get("validation"), prepared.bundle.labels
    if result is None or result.labels is None or labels.task not in (Task.BINARY, Task.MULTICLASS):
        return None
    probabilities = probabilities_of(result.logits, labels.task)
    return HeldOut.of(probabilities, choose_labels(probabilities, labels.task, labels.thresholds), result.labels)


def write_model(
    run: RunDir, prepared: Prepared, weights: dict[str, torch.Tensor], card: str, held_out: HeldOut | None
) -> None:
    """Write model/ and the model card. The manifest has the identity of the run and the hashes of its result files."""
    describe = describe_model(prepared.state.model, prepared.tokenizer, replace(prepared.facts, held_out=held_out))
    results = {f.name: hash_file(f) for f in (run.metrics_file, run.predictions_file) if f.is_file()}
    meta = {"step": prepared.state.step, RESULTS: results, **prepared.identity.to_json()}
    export_model(run.model, weights, describe, card, meta)
    write_file(run.card_file, card.encode())


def draw_and_explain(run: RunDir, before_report: Callable[[], None]) -> list[str]:
    """Write the curves and the report, which makes the run a finished one; return the diagnosis as lines."""
    report = build_report(run)
    write_curves(report.curves, png=run.curves_png, svg=run.curves_svg)
    before_report()
    write_report(report, run.report_file)
    return describe_findings(report.findings)


SHOWN_OPTION_NAMES = """
    learning_rate lr_scheduler_type warmup_steps per_device_train_batch_size gradient_accumulation_steps num_train_epochs
    max_steps weight_decay max_grad_norm label_smoothing_factor adversarial class_weights seed
"""


def write_card(prepared: Prepared, scores: Scores, *, steps: int, best_step: int | None) -> str:
    """Return the model card: Markdown with the metadata block that the Hub reads."""
    name, base = prepared.config.name, prepared.config.model_name_or_path or "all-MiniLM-L6-v2"
    bundle = prepared.bundle
    names = ", ".join(f"`{n}`" for n in bundle.labels.names[:20])
    what = {Task.REGRESSION: "a number", Task.MULTILABEL: f"any of {names}"}.get(bundle.labels.task, f"one of {names}")
    columns = ", ".join(f"`{c}`" for c in bundle.columns.named)
    pair = ', "text_pair": "..."' if len(bundle.columns.text) == 2 else ""
    text = "\\n".join(f"{' '.join(c.split())}: ..." for c in bundle.columns.rendered) or "..."
    lines = ["---", _metadata(prepared, scores, name, str(base)), "---", "", f"# {_escape(name)}", ""]
    lines += [f"`{base}` fine-tuned by tunesmith to predict {what} from {columns}.", ""]
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
    return "\n".join([*lines, "", "## Limits", "", limits, "## Use", "", USE.format(text=text, pair=pair)])


LIMITS = """\
- The model reads {length} tokens of a text at a time. The option `long_texts` controls longer texts.
- The scores apply to texts like these. Other kinds of text, languages and lengths were not measured.
- Probabilities are not calibrated unless a line under Data says so.
- The intervals cover the sample of examples, not the random seed, which may change the score as much.
"""
USE = """\
```python
from transformers import pipeline

classify = pipeline("text-classification", "model")
classify({{"text": "{text}"{pair}}})
```
"""


def _metadata(prepared: Prepared, scores: Scores, name: str, base: str) -> str:
    """Return the YAML block of the card."""
    import yaml
    from huggingface_hub import EvalResult, ModelCardData

    split = "test" if "test" in scores else next(iter(scores), "")
    data = str(prepared.config.task_name or prepared.config.dataset_name or "custom")
    results = [
        EvalResult("text-classification", data, data, metric, round(score.value, 6), dataset_split=split)
        for metric, score in scores.get(split, {}).items()
        if score.value is not None
    ]
    card = ModelCardData(
        base_model=base if "/" in base and not base.startswith((".", "/")) else None,
        eval_results=results or None,
        library_name="transformers",
        model_name=name,
        pipeline_tag="text-classification",
        tags=["tunesmith"],
    )
    return str(yaml.safe_dump(card.to_dict(), sort_keys=False)).rstrip()


def _data_table(prepared: Prepared) -> list[str]:
    lines = ["| split | rows | tokens: median, longest | truncated rows |", "|---|---|---|---|"]
    for split, tokenized in prepared.tokenized.items():
        lengths = tokenized.rows.lengths
        tokens = f"{np.median(lengths):.0f}, {lengths.max()}" if len(lengths) else ""
        lines.append(f"| {split} | {len(lengths):,} | {tokens} | {tokenized.truncated.rows_cut:,} |")
    return lines


def _escape(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


@dataclass(frozen=True)
class RunResult:
    """The result of a run. `scores[split][metric]` has value, interval and n; `diagnosis` is a list of lines."""

    run: RunDir
    scores: dict[str, dict[str, Score]]
    steps: int
    best_step: int | None
    diagnosis: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """Warnings of the data audit, as lines."""

    @cached_property
    def predictor(self) -> Predictor:
        """Return the trained model, loaded when it is first used."""
        from tunesmith.inference.predictor import Predictor

        return Predictor.load(self.run.path)

    def predict(self, texts: Any) -> list[Any]:
        """Return the label of each text, in input order: a name, a list of names (multilabel) or a number (regression).

        `texts` is a list of texts or pairs, a Series, an array, or a table with the text columns of the training data.
        """
        return self.predictor.predict(texts)

    def predict_proba(self, texts: Any) -> Any:
        """Return one row of probabilities per text, in the order of `classes_`; the number itself for regression."""
        table = self.predictor.probabilities(texts)
        labels = self.predictor.facts.labels
        return table if labels.task is Task.REGRESSION else table[:, labels.class_order]

    @property
    def classes_(self) -> list[str]:
        """Return sorted label names, as in scikit-learn: the columns of `predict_proba`."""
        return self.predictor.classes_

    @property
    def labels(self) -> tuple[str, ...]:
        """Return label names in the order of the model's `id2label`."""
        return self.predictor.facts.labels.names

    def evaluate(self, data: Any) -> dict[str, Score]:
        """Return every metric with its interval on labeled rows, a table as for training."""
        facts = self.predictor.facts
        texts, labels = facts.read_labeled(data)
        scores = facts.suite().compute_with_intervals(self.predictor.predict_texts(texts).logits, labels)
        if next(iter(scores.values())).n == 0:
            raise DataError("no row has a label", fix="Pass labeled rows.")
        return scores

    def report(self) -> Path:
        """Draw the report again; return its path."""
        from tunesmith.report.build import build_report, write_report

        return write_report(build_report(self.run), self.run.report_file)

    def __repr__(self) -> str:
        split = "test" if "test" in self.scores else next(iter(self.scores), None)
        score = next(((k, v) for k, v in self.scores[split].items()), None) if split is not None else None
        text = f", {split} {score[0]} {score[1].text()}" if score is not None else ""
        return f"RunResult({str(self.run.path)!r}, {self.steps} steps{text})"

    def _repr_html_(self) -> str:
        """Return scores, diagnosis and curves for a notebook."""
        lines = [f"{self.run.name}: {self.steps} steps, weights of step {self.best_step or self.steps}", ""]
        for split, found in self.scores.items():
            lines += [f"{split}: {score.title(metric)} {score.text()}" for metric, score in found.items()]
        text = escape("\n".join([*lines, "", *self.diagnosis, "", str(self.run.report_file)]))
        return f"<pre style='white-space:pre-wrap'>{text}</pre>{self._picture()}"

    def _picture(self) -> str:
        if not self.run.curves_svg.is_file():
            return ""
        data = base64.b64encode(self.run.curves_svg.read_bytes()).decode()
        return f"<img alt='learning curves' style='max-width:100%' src='data:image/svg+xml;base64,{data}'>"
