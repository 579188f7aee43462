"""What the runs of bench/diagnose_runs.py are, by construction and by their test rows, and their verdicts by the present code."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagnose_causes import CAUSES, COMPARED, LATE, MADE_WELL, RISEN, Key, name_run
from diagnose_drawn import FEWEST_STEPS
from diagnose_make import advice_of, read_bank
from diagnose_tasks import TASKS
from tunesmith.diagnosis.features import LEAST_CHANGE, Change, change_between, gain_of_score
from tunesmith.events import RowsEvaluated
from tunesmith.findings import Finding
from tunesmith.metrics.evidence import RowEvidence, decode_rows
from tunesmith.report.build import diagnose_with
from tunesmith.runs.curves import Curves, build_curves
from tunesmith.runs.event_log import columns_of, parse_events

SIGMAS = 2.0
LEAST_LOSS, LEAST_SCORE = 0.05, 0.02
"""A run is harmed when its test loss is higher by more than 5% or its test score lower by more than 2 points than that of the
healthy run of the task, and by more than two standard errors of the paired difference."""
LEAST_RISE = 0.2
"""A run on few rows is harmed when earlier weights of it have a test loss that is lower by more than 20%, and by more than 5% of
the best constant's loss (a fifth of nearly nothing is no harm), or a test score higher by more than 2 points, beyond two
standard errors of the paired difference."""


@dataclass(frozen=True, eq=False)
class Run:
    """A run of the bank with its findings by the present code."""

    key: Key
    options: dict[str, Any]
    summary: dict[str, Any]
    curves: Curves
    findings: list[Finding]
    test: RowEvidence
    right: tuple[str, ...]
    harm: str

    @property
    def group(self) -> str:
        """Whether rules may be chosen on this task, or are reported on it."""
        return TASKS[self.key[1]].group

    @property
    def verdict(self) -> str:
        """The code of the first finding."""
        return self.findings[0].code

    @property
    def named(self) -> tuple[str, ...]:
        """The verdicts that are named as likely: the first and those beside it."""
        likely = self.findings[0].numbers.get("likelihoods", {})
        return (self.verdict, *(code for code, p in likely.items() if p >= 0.15))

    @property
    def is_alarm(self) -> bool:
        """Whether the first finding is a warning or an error."""
        return self.findings[0].severity != "info"

    @property
    def at_chance(self) -> bool:
        """Whether the last validation score is not above the best constant by two errors."""
        return is_at_chance(self.curves)


@dataclass(frozen=True, eq=False)
class Followed:
    """A run that follows an advice, beside the run it was given for. `kept`: whether the present code gives the same advice."""

    run: Run
    verdict: str
    changes: dict[str, str | None]
    place: int
    """0: the first advice."""
    test: RowEvidence
    kept: bool

    def changes_of(self) -> tuple[Change, Change]:
        """(gain of the score, fall of the loss) on the test rows."""
        before, after = self.run.test, self.test
        score = change_between(before.score_parts()[1], after.score_parts()[1])
        return score, change_between(after.loss, before.loss)


def load_runs(output: Path, *, groups: Collection[str]) -> tuple[list[Run], list[Followed]]:
    """Judges every run of the bank with the present code."""
    found: dict[Key, tuple[dict[str, Any], Curves, RowEvidence]] = {}
    later: list[dict[str, Any]] = []
    for run in read_bank(output):
        model, task, cause, seed = run["key"]
        if TASKS[task].group not in groups:
            continue
        if "changes" in run:
            later.append(run)
            continue
        events = list(parse_events(run["journal"].encode(), name_run((model, task, cause, seed))))
        curves = build_curves(columns_of(events), name=task)
        texts = curves.row_texts["test"]
        found[model, task, cause, seed] = (run, curves, decode_rows(texts[max(texts)]))
    runs = {key: _judge(key, *parts, found) for key, parts in found.items()}
    return list(runs.values()), [_follow(runs[tuple(run["key"])], run) for run in later]


def _follow(run: Run, later: dict[str, Any]) -> Followed:
    (event,) = parse_events(later["test"].encode() + b"\n", name_run(run.key))
    assert isinstance(event, RowsEvaluated)
    same = run.verdict == later["verdict"] and advice_of(run.findings) == later["changes"]
    return Followed(run, later["verdict"], later["changes"], later["place"], decode_rows(event.rows), same)


def _judge(key: Key, run: dict[str, Any], curves: Curves, test: RowEvidence, found: dict[Key, Any]) -> Run:
    """Truth by construction; a cause that did no harm on this task is healthy, a run at chance is not."""
    cause = key[2]
    right, harm = CAUSES[cause].right, "made so"
    learnt = gain_of_score(test).z > SIGMAS
    if cause in MADE_WELL:
        few = curves.last_step < FEWEST_STEPS
        right, harm = (NOT_HEALTHY, "at chance") if is_at_chance(curves) else ((*right, *LATE) if few else right, "")
        if harm and curves.rows["validation"] < FEW_VALIDATION:
            right = (*right, "not_enough_evidence")
        if not harm and run["options"].get("load_best_model_at_end") is False and _rise_on_test(curves, test):
            right, harm = (*right, *RISEN), "risen"
    elif cause in COMPARED or CAUSES[cause].right == RISEN:
        harm = _rise_on_test(curves, test) if CAUSES[cause].right == RISEN else _worse_than_usual(key, test, found)
        harm = harm or ("" if learnt else "at chance")
        right = right if harm else ("healthy", *right)
    findings = diagnose_with(curves, run["options"], run["summary"])
    return Run(key, run["options"], run["summary"], curves, findings, test, right, harm)


def is_at_chance(curves: Curves) -> bool:
    """Whether the last validation score is not above the best constant by two errors."""
    texts = curves.row_texts.get("validation", {})  # none where the first steps were not finite
    return not texts or not gain_of_score(decode_rows(texts[max(texts)])).z > SIGMAS


NOT_HEALTHY = ("underfitting", "stopped_too_early", "no_signal", "label_noise", "overfitting", "class_ignored")
"""What may be said of a run without a fault that is at chance."""
FEW_VALIDATION = 100
"""With fewer validation rows "not enough evidence" may be said of a run at chance, too."""


def _worse_than_usual(key: Key, test: RowEvidence, found: dict[Key, Any]) -> str:
    usual = {k[3]: parts[2] for k, parts in found.items() if k[:3] == (key[0], key[1], "healthy")}
    return is_worse(test, usual[min(usual)]) if usual else ""


def _rise_on_test(curves: Curves, test: RowEvidence) -> str:
    """In what way the last weights are worse on the test rows than those of the lowest validation loss."""
    loss = curves.metric("validation", "loss").finite()
    best = int(loss.step[int(np.argmin(loss.value))])
    texts = curves.row_texts["test"]
    return is_worse(test, decode_rows(texts[best]), LEAST_RISE) if best in texts and best != max(texts) else ""


def is_worse(run: RowEvidence, other: RowEvidence, least: float = LEAST_LOSS) -> str:
    """In what way `run` is worse than `other` on the test rows, "" when it is not."""
    loss = change_between(other.loss, run.loss)
    constant = LEAST_CHANGE * float(other.constant_loss.mean()) if least == LEAST_RISE else 0.0
    if not math.isfinite(loss.size) or loss.size > max(SIGMAS * loss.error, least * loss.before, constant):
        return "loss"
    score = change_between(run.score_parts()[1], other.score_parts()[1])
    return "score" if score.size > max(SIGMAS * score.error, LEAST_SCORE) else ""


def export_curves(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """The same curves as plain lists, for other packages. A loss that was not finite is None."""
    from tunesmith.diagnosis.features import read_curves

    found = {}
    for run in runs:
        reading = read_curves(run.curves, run.options)
        found[name_run(run.key)] = {
            "step": run.curves.train_loss.step.tolist(),
            "loss": _plain(run.curves.train_loss.value),
            "rate": _plain(run.curves.learning_rate.value),
            "norm": _plain(run.curves.grad_norm.value),
            "eval_step": reading.step.tolist(),
            "val_loss": reading.val_loss.tolist(),
            "train_loss": reading.train_loss.tolist(),
        }
    return found


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]
