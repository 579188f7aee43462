"""An exported model beside the original on the same rows, those of the run itself: difference, agreement, score and speed, and a
verdict. The training rows calibrate a quantisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.config.load import load_config
from tunesmith.data.columns import Columns
from tunesmith.data.read import read_labelled
from tunesmith.data.tokenize import make_token_rows
from tunesmith.errors import ConfigError
from tunesmith.inference.facts import ModelFacts
from tunesmith.inference.predictor import Network
from tunesmith.inference.tables import probabilities_of
from tunesmith.labels import LabelMap, Task, choose_labels
from tunesmith.metrics.intervals import Score
from tunesmith.metrics.paired import PairedResult, compare_predictions
from tunesmith.metrics.table import make_suite
from tunesmith.pipeline.inputs import read_run_data
from tunesmith.runs.folder import RunDir

MOST_ROWS = 5_000
CALIBRATION_ROWS = 256


@dataclass(frozen=True)
class EvidenceRows:
    """Texts by column with their labels, from one split; `calibration` are texts of training rows."""

    split: str
    texts: list[list[str]]
    labels: npt.NDArray[Any]
    calibration: list[list[str]]

    def __len__(self) -> int:
        return len(self.labels)


def rows_of_run(run: RunDir, facts: ModelFacts) -> EvidenceRows:
    """Labelled test rows if there are any, else validation rows; read again from the files that run.yaml names."""
    config = load_config(run.config_file)
    try:
        bundle = read_run_data(config, {}, _silent, need_weights=False).bundle
    except ConfigError as error:
        problem = f"the rows of the run cannot be read again ({error.problem})"
        raise ConfigError(problem, where=str(run.path), fix="Give --test_file, and --train_file for int8.") from None
    assert facts.text_columns is not None
    for split in ("test", *(name for name in bundle.splits if name.startswith("validation"))):
        if split in bundle.splits:
            found = _labelled(bundle.splits[split], facts, split)
            if len(found[1]):
                return EvidenceRows(split, *found, _texts(bundle.splits["train"], facts, CALIBRATION_ROWS))
    raise ConfigError("has no labelled test or validation row", where=str(run.path), fix="Give --test_file.")


def rows_of_files(test_file: str, train_file: str | None, facts: ModelFacts, **reading: Any) -> EvidenceRows:
    """Rows of files that the user names: for a model folder that is not in its run."""
    columns = Columns(facts.text_columns or ("text",), facts.label_column or "label", facts.labels.task)

    def read(file: str) -> Any:
        return read_labelled(Path(file), columns=columns, labels=facts.labels, **reading)

    texts, labels = _labelled(read(test_file), facts, "test")
    if not len(labels):
        raise ConfigError("has no labelled row", where=test_file)
    calibration = [] if train_file is None else _texts(read(train_file), facts, CALIBRATION_ROWS)
    return EvidenceRows("test", texts, labels, calibration)


def _texts(dataset: Any, facts: ModelFacts, count: int) -> list[list[str]]:
    """`count` rows, spread over the data set because files are often sorted."""
    rows = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int)
    some = dataset.select(rows.tolist())
    return [list(some[name]) for name in facts.text_columns or ("text",)]


def _labelled(dataset: Any, facts: ModelFacts, split: str) -> tuple[list[list[str]], npt.NDArray[Any]]:
    labels = np.asarray(dataset["labels"])
    known = np.isfinite(labels) if labels.dtype.kind == "f" else labels >= 0
    known = known.all(axis=1) if known.ndim == 2 else known
    rows = np.flatnonzero(known)[:MOST_ROWS]
    some = dataset.select(rows.tolist())
    return [list(some[name]) for name in facts.text_columns or ("text",)], labels[rows]


def _silent(what: str, done: int, total: int) -> None:
    """No progress bar: reading is quick compared with the export."""


FLOAT_LIMIT = 1e-4
SPEED_ROWS = 256
LEVEL = 0.05
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Checked:
    """One candidate beside the original. `refused` is the reason not to publish it, None when it may be."""

    name: str
    rows: int
    split: str
    max_difference: float
    agreement: float
    score: Score
    original: Score
    paired: PairedResult
    refused: str | None

    def to_json(self) -> dict[str, Any]:
        """A plain dict for export.json."""
        return {
            "name": self.name,
            "rows": self.rows,
            "split": self.split,
            "max_difference": self.max_difference,
            "agreement": self.agreement,
            "metric": self.paired.metric,
            "score": self.score.to_json(),
            "original_score": self.original.to_json(),
            "paired": self.paired.to_json(),
            "refused": self.refused,
        }


def logits_of(network: Network, texts: list[list[str]]) -> Logits:
    """Logits of texts in memory, in order."""
    rows = make_token_rows(network.encoder.encode(texts), has_types=network.has_types)
    return network.answer(rows)


def check_float(name: str, found: Logits, original: Logits, rows: EvidenceRows, facts: ModelFacts) -> Checked:
    """A float format must give the probabilities of the original to 1e-4, and every label."""
    checked = _check(name, found, original, rows, facts)
    reason = None
    if not np.isfinite(found).all():
        reason = "some answers are not numbers"
    elif checked.max_difference > FLOAT_LIMIT:
        reason = f"probabilities differ by up to {checked.max_difference:.1e}; the limit is {FLOAT_LIMIT:.0e}"
    elif checked.agreement < 1:
        reason = f"{(1 - checked.agreement):.2%} of the labels differ"
    return replace(checked, refused=reason)


@dataclass(frozen=True)
class Tolerance:
    """The largest drop of the score that int8 may cause, and the least share of equal answers (not for regression)."""

    max_drop: float = 0.005
    min_agreement: float = 0.99


def check_quantised(
    name: str, found: Logits, original: Logits, rows: EvidenceRows, facts: ModelFacts, may: Tolerance
) -> Checked:
    """int8 must stay within the tolerance, and no loss may be evident in the paired test."""
    checked = _check(name, found, original, rows, facts)
    reason = None
    if not np.isfinite(found).all():
        return replace(checked, refused="some answers are not numbers")
    paired = checked.paired
    if paired.difference is None or paired.p_value is None:
        return replace(checked, refused=f"{paired.metric} is not defined on these {len(rows)} rows")
    sign = 1 if make_suite(facts.labels.task).greater_is_better(paired.metric) else -1
    loss = -sign * paired.difference
    if loss > may.max_drop:
        reason = f"{paired.metric} drops by {loss:.4f}; --max_drop is {may.max_drop:g}"
    elif loss > 0 and paired.p_value < LEVEL:
        reason = f"{paired.metric} drops by {loss:.4f}, which is no chance (p = {paired.p_value:.3f})"
    elif checked.agreement < may.min_agreement and facts.labels.task is not Task.REGRESSION:
        reason = f"{checked.agreement:.2%} of the labels are equal; --min_agreement is {may.min_agreement:g}"
    return replace(checked, refused=reason)


def _check(name: str, found: Logits, original: Logits, rows: EvidenceRows, facts: ModelFacts) -> Checked:
    labels = facts.labels
    ours, theirs = probabilities_of(original, labels.task), probabilities_of(found, labels.task)
    scale = np.maximum(1.0, np.abs(ours)) if labels.task is Task.REGRESSION else 1.0
    apart = np.abs(theirs - ours) / scale
    suite = make_suite(labels.task, names=facts.metrics, glue_task=None if facts.metrics else facts.glue_task)
    metric = suite.metric_for_best_model
    scored = np.nan_to_num(found)
    return Checked(
        name=name,
        rows=len(rows),
        split=rows.split,
        max_difference=float(np.nanmax(apart)) if np.isfinite(apart).any() else float("inf"),
        agreement=float((_decisions(theirs, labels) == _decisions(ours, labels)).mean()),
        score=suite.compute_with_intervals(scored, rows.labels)[metric],
        original=suite.compute_with_intervals(original, rows.labels)[metric],
        paired=compare_predictions(original, scored, rows.labels, task=labels.task, metric=metric),
        refused=None,
    )


def _decisions(probabilities: npt.NDArray[np.float64], labels: LabelMap) -> npt.NDArray[Any]:
    """What counts as the same answer: the class, each label, or the value to 1e-4."""
    if labels.task is Task.REGRESSION:
        return np.asarray(np.round(probabilities[:, 0], 3))
    return np.asarray(choose_labels(probabilities, labels.task, labels.thresholds)).reshape(-1)


def rows_per_second(
    networks: dict[str, Network],
    texts: list[list[str]],
    *,
    turns: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Rows a second of each network, from text: the best of a few alternating turns, so that other load affects all equally."""
    some = [column[:SPEED_ROWS] for column in texts]
    best = dict.fromkeys(networks, float("inf"))
    for network in networks.values():
        logits_of(network, [column[:8] for column in some])
    for _ in range(turns):
        for name, network in networks.items():
            start = clock()
            logits_of(network, some)
            best[name] = min(best[name], clock() - start)
    return {name: len(some[0]) / seconds for name, seconds in best.items()}


def table_of(candidates: list[Checked]) -> str:
    """The candidates as a Markdown table."""
    lines = [
        "| candidate | max abs dp | labels equal | score | original | difference | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in candidates:
        paired = one.paired
        gap = "" if paired.difference is None else f"{paired.difference:+.4f} [{paired.low:+.4f}, {paired.high:+.4f}]"
        lines.append(
            f"| {one.name} | {one.max_difference:.1e} | {one.agreement:.2%} | {one.score.text()} | {one.original.text()} | "
            f"{gap} | {one.refused or 'accepted'} |"
        )
    return "\n".join(lines)
