"""What comes out of a run: its messages and events while it runs, its result at the end; helpers; and what a caller
that trains several runs for one model does to each between its last step and its scores.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import DataError
from tunesmith.events import Event
from tunesmith.labels import Task
from tunesmith.runs.folder import RunDir

if TYPE_CHECKING:
    from tunesmith.inference.predictor import Predictor
    from tunesmith.metrics.intervals import Score


Say = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]
"""Called with (what, done, in all): rows, or bytes while a file is read."""


PAIR_STAGE = "pair warm-up"
"""The name under which the steps of the pair warm-up are shown as progress."""


@dataclass
class Watch:
    """Receives the messages and events of a run. `plan` is called with (total steps, steps per epoch) before the first event.

    Without `pages` no curves and no report are drawn at the end, as in a search over many runs.
    """

    say: Say = lambda text: None
    progress: ShowProgress = lambda what, done, total: None
    plan: Callable[[int, float], None] = lambda num_steps, steps_per_epoch: None
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    pages: bool = True
    start_steps: int | None = None
    """Steps of a pair start at most: `tunesmith plan` times a few and forecasts the others."""
    positive_name: str | None = None
    """The class that F1, precision and recall are about; set before the first event."""

    def title(self, metric: str) -> str:
        """The metric with the class it is about."""
        name = self.positive_name if metric in ("f1", "precision", "recall") else None
        return metric if name is None else f"{metric} of {name!r}"


@dataclass(frozen=True)
class RunEnding:
    """`enough` ends training after an event, with the weights as they are; `change` is given the model before it is scored.

    `thresholds`, `lines` (in addition to the recipe's) and `scores` (in addition to those of the splits) are stored with the run.
    """

    enough: Callable[[Event], bool] = lambda event: False
    change: Callable[[Any], None] = lambda model: None
    thresholds: tuple[float, ...] | None = None
    lines: tuple[str, ...] = ()
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)


SHOWN_METRICS = 4
"""Metrics shown with the loss in what a notebook shows; the report has them all."""


@dataclass(frozen=True)
class RunResult:
    """What a run ended with. `scores[split][metric]` has value, interval and n; `diagnosis` is in lines."""

    run: RunDir
    scores: dict[str, dict[str, Score]]
    steps: int
    best_step: int | None
    diagnosis: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """What the audit of the data warns of, in lines."""

    @cached_property
    def predictor(self) -> Predictor:
        """The trained model, loaded when it is first used."""
        from tunesmith.inference.predictor import Predictor

        return Predictor.load(self.run.path)

    def predict(self, texts: Any) -> list[Any]:
        """The label of each text, in input order: a name, a list of names (multilabel) or a number (regression).

        `texts` is a list of texts or pairs, a Series, an array, or a table that has the text columns of the training data.
        """
        return self.predictor.predict(*self._text_columns(texts).values())

    def predict_proba(self, texts: Any) -> Any:
        """Return one row of probabilities per text, in the order of `classes_`; the number itself for regression."""
        table = self.predictor.probabilities(*self._text_columns(texts).values())
        labels = self.predictor.facts.labels
        return table if labels.task is Task.REGRESSION else table[:, labels.class_order]

    @property
    def classes_(self) -> list[str]:
        """Sorted label names, as in scikit-learn: the columns of `predict_proba`."""
        return self.predictor.classes_

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names in the order of the model's `id2label`."""
        return self.predictor.facts.labels.names

    def evaluate(self, data: Any, labels: Any = None) -> dict[str, Score]:
        """Every metric with its interval on labeled rows: a table as for training, or texts and their labels."""
        from tunesmith.data.columns import Columns
        from tunesmith.data.in_memory import columns_table
        from tunesmith.data.read import read_labelled
        from tunesmith.metrics.table import make_suite

        facts = self.predictor.facts
        text, label = tuple(facts.text_columns or ()), facts.label_column or "label"
        if labels is not None:
            data = columns_table({**self._text_columns(data), label: labels})
        dataset = read_labelled(data, columns=Columns(text, label, facts.labels.task), labels=facts.labels)
        found = [list(dataset[name]) for name in text]
        logits = self.predictor.predict_texts(iter([found])).logits
        known = facts.labels
        suite = make_suite(
            known.task, names=facts.metrics, positive_name=known.positive_name, thresholds=known.thresholds
        )
        scores = suite.compute_with_intervals(logits, dataset.with_format("numpy")["labels"][:])
        if next(iter(scores.values())).n == 0:
            raise DataError("no row has a label", fix="Pass labeled rows.")
        return scores

    def report(self) -> Path:
        """The page about this run, drawn again; open it in a browser."""
        from tunesmith.report.build import build_report
        from tunesmith.report.render import write_report

        return write_report(build_report(self.run), self.run.report_file)

    def _text_columns(self, texts: Any) -> dict[str, list[str]]:
        """The texts under the names of the training columns; the wrong number of texts a row is refused."""
        from tunesmith.data.in_memory import text_columns_of

        names = tuple(self.predictor.facts.text_columns or ())
        has = set(texts) if isinstance(texts, Mapping) else set(getattr(texts, "columns", ()))
        if has and set(names) <= has:
            texts = {name: texts[name] for name in names}
        columns = text_columns_of(texts)
        if len(columns) != len(names):
            raise ValueError(
                f"{len(columns)} texts a row were given; the model was trained on {len(names)} ({', '.join(names)})"
            )
        return dict(zip(names, columns.values(), strict=True))

    def __repr__(self) -> str:
        split = "test" if "test" in self.scores else next(iter(self.scores), None)
        score = next(((k, v) for k, v in self.scores[split].items()), None) if split is not None else None
        text = f", {split} {score[0]} {score[1].text()}" if score is not None else ""
        return f"RunResult({str(self.run.path)!r}, {self.steps} steps{text})"

    def _repr_html_(self) -> str:
        """Scores, diagnosis and curves, as a notebook shows them."""
        splits = list(self.scores)
        metrics = list(dict.fromkeys(m for found in self.scores.values() for m in found))
        shown = [*[m for m in metrics if m != "loss"][:SHOWN_METRICS], *[m for m in metrics if m == "loss"]]
        head = "".join(f"<th style='text-align:left'>{escape(s)}</th>" for s in ("", *splits))
        rows = "".join(
            f"<tr><td>{escape(self._title(metric))}</td>"
            + "".join(
                f"<td>{escape(self.scores[s][metric].text()) if metric in self.scores[s] else ''}</td>" for s in splits
            )
            + "</tr>"
            for metric in shown
        )
        said = "".join(
            f"<div style='margin-left:{1.2 if line.startswith(' ') else 0}em'>{escape(line.strip())}</div>"
            for line in self.diagnosis
        )
        return (
            f"<div><b>{escape(self.run.name)}</b> &middot; {self.steps} steps, weights of step "
            f"{self.best_step or self.steps} &middot; <code>{escape(str(self.run.report_file))}</code>"
            f"<table><tr>{head}</tr>{rows}</table>{said}{self._picture()}</div>"
        )

    def _title(self, metric: str) -> str:
        return next(found[metric].title(metric) for found in self.scores.values() if metric in found)

    def _picture(self) -> str:
        if not self.run.curves_svg.is_file():
            return ""
        data = base64.b64encode(self.run.curves_svg.read_bytes()).decode()
        return f"<img alt='learning curves' style='max-width:100%' src='data:image/svg+xml;base64,{data}'>"
