"""What the runs of bench/diagnose_runs.py are in truth, by construction and by their held-out score, and what is said of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagnose_causes import CAUSES, Key, name_reference, read_test
from tunesmith.findings import Finding

SIGMAS = 2.0
LEAST_ACCURACY, LEAST_LOSS = 0.02, 0.05
"""A run is worse than another when its accuracy is lower by more than two points, or its log loss higher by more than 5%,
and by more than two standard errors of the paired difference over the test rows."""


@dataclass(frozen=True, eq=False)
class Run:
    """A run that was made: its findings by the present code, and the log loss and rightness of each test row."""

    key: Key
    folder: Path
    options: dict[str, Any]
    findings: list[Finding]
    losses: NDArray[np.float64]
    right: NDArray[np.float64]
    majority: float

    @property
    def verdict(self) -> str:
        """The code of the first finding."""
        return self.findings[0].code

    @property
    def accuracy(self) -> float:
        """On the test rows; 0 when the run was lost."""
        return float(self.right.mean()) if len(self.right) else 0.0

    @property
    def loss(self) -> float:
        """Log loss on the test rows; infinite when the run was lost."""
        return float(self.losses.mean()) if len(self.losses) else math.inf

    def at_chance(self) -> bool:
        """Whether the accuracy is no better than that of the most frequent class."""
        error = math.sqrt(self.majority * (1 - self.majority) / max(1, len(self.right)))
        return self.accuracy <= self.majority + SIGMAS * error


def load_run(folder: Path) -> Run:
    """Judges a run folder with the present code."""
    from tunesmith.report.diagnosis import diagnose_run

    made = json.loads((folder / "made.json").read_text())
    losses, right = read_test(folder)
    counts = json.loads((folder / "data_summary.json").read_text())["label_counts"]["test"].values()
    majority = max(counts) / sum(counts)
    model, data, cause, seed = made["key"]
    return Run(
        (model, data, cause, seed),
        folder,
        made["options"],
        diagnose_run(folder),
        np.array(losses),
        np.array(right, dtype=np.float64),
        majority,
    )


def load_runs(output: Path) -> dict[Key, Run]:
    """The runs made so far, without those that follow an advice."""
    folders = [file.parent for file in sorted(output.glob("*/made.json")) if "+" not in file.parent.name]
    return {run.key: run for run in map(load_run, folders)}


def is_worse(run: Run, other: Run) -> str:
    """In what way `run` is worse than `other` on the test rows, "" when it is not."""
    if not len(run.right):
        return "lost"
    for name, gap, least in (
        ("accuracy", other.right - run.right, LEAST_ACCURACY),
        ("log loss", run.losses - other.losses, LEAST_LOSS * other.loss),
    ):
        error = float(gap.std() / math.sqrt(len(gap)))
        if gap.mean() > max(SIGMAS * error, least):
            return f"{name} {gap.mean():+.3f}"
    return ""


@dataclass(frozen=True)
class Truth:
    """The verdicts that are right, whether the run is healthy, and what on the test rows says so."""

    right: tuple[str, ...]
    healthy: bool
    why: str

    def is_cured(self, run: Run, after: Run) -> bool:
        """Whether the score that shows the harm is better in the second run: log loss where only that is worse."""
        return after.loss < run.loss if self.why.startswith("log loss") else after.accuracy > run.accuracy


def find_truth(run: Run, runs: Mapping[Key, Run]) -> Truth | None:
    """What the run is; None when it is not judged, or when what it is compared with is not made yet."""
    model, data, cause, seed = run.key
    if cause.startswith("healthy"):
        return Truth(("healthy",), True, "") if not run.at_chance() else None
    reference = runs.get((model, data, name_reference(run.key) or "", seed))
    if reference is None:
        return None
    harm = is_worse(run, reference) or ("at chance" if run.at_chance() else "")
    return Truth(CAUSES[cause].right, False, harm) if harm else Truth(("healthy",), True, "not harmed")


def export_curves(runs: Mapping[Key, Run]) -> dict[str, dict[str, Any]]:
    """The same curves as plain lists, for other packages. A loss that was not finite is None."""
    from tunesmith.curves.build import load_curves
    from tunesmith.diagnose.reading import read_curves

    found = {}
    for key, run in runs.items():
        curves = load_curves(run.folder)
        reading = read_curves(curves, run.options)
        found["-".join(map(str, key))] = {
            "step": curves.train_loss.step.tolist(),
            "loss": _plain(curves.train_loss.value),
            "rate": _plain(curves.learning_rate.value),
            "norm": _plain(curves.grad_norm.value),
            "eval_step": reading.step.tolist(),
            "val_loss": reading.val_loss.tolist(),
            "train_loss": reading.train_loss.tolist(),
        }
    return found


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]
