"""What the runs of bench/diagnose_runs.py are, by construction and by their test rows, and their verdicts by the present code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagnose_causes import CAUSES, Key, name_run
from diagnose_make import read_bank
from diagnose_tasks import TASKS
from tunesmith.curves.from_journal import build_curves
from tunesmith.curves.series import Curves
from tunesmith.diagnose.signs import change_between, gain_of_score
from tunesmith.findings import Finding
from tunesmith.metrics.row_evidence import RowEvidence, decode_rows
from tunesmith.report.diagnosis import diagnose_with
from tunesmith.run.reader import columns_of, parse_events

SIGMAS = 2.0
LEAST_LOSS, LEAST_SCORE = 0.05, 0.02
"""A run is harmed when its test loss is higher by more than 5% or its test score lower by more than 2 points than that of the
healthy run of the task, and by more than two standard errors of the paired difference."""
MAY_BE_HEALTHY = ("few_rows", "fewer_rows", "batch_1", "rate_2e-3", "frozen", "half_learnt", "without_class")
"""Causes that do no harm on some tasks: such a run is healthy."""


@dataclass(frozen=True, eq=False)
class Run:
    """A run of the bank with its findings by the present code."""

    key: Key
    options: dict[str, Any]
    curves: Curves
    findings: list[Finding]
    test: RowEvidence
    right: tuple[str, ...]
    harm: str

    @property
    def half(self) -> str:
        """Whether rules may be chosen on this task, or are reported on it."""
        return "choose" if TASKS[self.key[1]].chosen else "report"

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
        rows = decode_rows(self.curves.row_texts["validation"][max(self.curves.row_texts["validation"])])
        return not gain_of_score(rows).z > SIGMAS


def load_runs(output: Path, *, half: str | None = None) -> list[Run]:
    """Judges every run of the bank with the present code."""
    found: dict[Key, tuple[dict[str, Any], Curves, RowEvidence]] = {}
    for run in read_bank(output):
        model, task, cause, seed = run["key"]
        if half is None or TASKS[task].chosen is (half == "choose"):
            events = list(parse_events(run["journal"].encode(), name_run((model, task, cause, seed))))
            curves = build_curves(columns_of(events), name=task)
            texts = curves.row_texts["test"]
            found[model, task, cause, seed] = (run, curves, decode_rows(texts[max(texts)]))
    return [_judge(key, *parts, found) for key, parts in found.items()]


def _judge(key: Key, run: dict[str, Any], curves: Curves, test: RowEvidence, found: dict[Key, Any]) -> Run:
    """Truth by construction; a cause that did no harm on this task is healthy."""
    _, task, cause, _ = key
    right, harm = CAUSES[cause].right, "" if cause.startswith("healthy") else "made so"
    if cause in MAY_BE_HEALTHY:
        usual = next((parts[2] for k, parts in found.items() if k[1] == task and k[2] == "healthy"), None)
        harm = "" if usual is None else is_worse(test, usual)
        harm = harm or ("" if gain_of_score(test).z > SIGMAS else "at chance")
        right = right if harm else ("healthy", *right)
    findings = diagnose_with(curves, run["options"], run["summary"])
    return Run(key, run["options"], curves, findings, test, right, harm)


def is_worse(run: RowEvidence, other: RowEvidence) -> str:
    """In what way `run` is worse than `other` on the test rows, "" when it is not."""
    loss = change_between(other.loss, run.loss)
    if not math.isfinite(loss.size) or loss.size > max(SIGMAS * loss.error, LEAST_LOSS * loss.before):
        return "loss"
    score = change_between(run.score_parts()[1], other.score_parts()[1])
    return "score" if score.size > max(SIGMAS * score.error, LEAST_SCORE) else ""


def export_curves(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """The same curves as plain lists, for other packages. A loss that was not finite is None."""
    from tunesmith.diagnose.evidence import read_curves

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
