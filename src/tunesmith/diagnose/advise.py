"""All rules over one run, the verdict first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunesmith.curves.series import Curves
from tunesmith.diagnose.diverged import check_diverged
from tunesmith.diagnose.erratic import check_erratic
from tunesmith.diagnose.healthy import check_healthy
from tunesmith.diagnose.label_problem import check_label_problem
from tunesmith.diagnose.not_enough_evidence import check_evidence, nothing_shown
from tunesmith.diagnose.overfitting import check_overfitting
from tunesmith.diagnose.reading import Reading, read_curves
from tunesmith.diagnose.stopped_early import check_stopped_early
from tunesmith.diagnose.underfitting import check_underfitting
from tunesmith.findings import Finding

Rule = Callable[[Reading], Finding | None]

RULES: tuple[Rule, ...] = (
    check_label_problem,
    check_erratic,
    check_overfitting,
    check_underfitting,
    check_stopped_early,
)
"""In order of rank: a cause stands before what it brings about (wrong labels make a run overfit, too)."""

CODES = (
    "healthy",
    "overfitting",
    "underfitting",
    "erratic",
    "diverged",
    "stopped_too_early",
    "still_learning",
    "data_problem",
    "not_enough_evidence",
)


def diagnose(
    curves: Curves,
    config: Mapping[str, Any],
    *,
    label_counts: Mapping[str, int] | None = None,
    num_labels: int | None = None,
    running: bool = False,
) -> list[Finding]:
    """Findings, the verdict first; never empty. `label_counts` are those of the training rows.

    The same curves up to an earlier step give what would have been said then: the live board calls this, too.
    `running`: the run goes on, so that it may be `still_learning` and has not stopped too early.
    """
    reading = read_curves(curves, config, label_counts=label_counts, num_labels=num_labels, running=running)
    lost = check_diverged(reading)
    if lost is not None:
        return [lost]
    thin = check_evidence(reading)
    if thin is not None:
        return [thin]
    found = [finding for rule in RULES if (finding := rule(reading)) is not None]
    # That learning goes on is no remark beside a problem.
    found = [finding for finding in found if finding.code != "still_learning"] or found
    return found or [check_healthy(reading) or nothing_shown(reading)]
