"""Match the predictions of two runs row by row. Different rows are an error and never dropped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.data.rows import read_prediction_columns
from tunesmith.errors import ConfigError, DataError
from tunesmith.events import Finding
from tunesmith.labels import Task
from tunesmith.metrics.paired import LEVEL, PairedResult, compare_predictions
from tunesmith.metrics.table import DEFAULTS, canonical_name, greater_is_better, metric_names
from tunesmith.report.build import diagnose_run, read_run_config, say_value
from tunesmith.report.predictions import (
    Headline,
    PredictedRows,
    headline_scores,
    labeled_splits,
    split_rank,
)
from tunesmith.runs.event_log import Curves
from tunesmith.runs.folder import RunDir, load_curves, open_run, read_metrics, read_summary, verify_results


def compare_rows(a: PredictedRows, b: PredictedRows, *, split: str, metric: str) -> tuple[PairedResult, int]:
    """Return the test of B against A on the same examples, and how many have different predictions (0 in regression).

    A DataError reports how examples, labels or tasks differ.
    """
    if a.task is not b.task or set(a.names) != set(b.names):
        raise DataError(
            f"one run predicts {_say(a)}, the other {_say(b)}", fix="Only runs of one task can be compared row by row."
        )
    keys, others = _keys(a), _keys(b)
    where = {key: k for k, key in enumerate(others)}
    missing = sum(key not in where for key in keys)
    extra = len(others) - (len(keys) - missing)
    if missing or extra or len(where) != len(others):
        raise DataError(
            f"the {split} rows differ: {missing} of {len(keys)} rows are not in the other run, which has {extra} others",
            fix="Score both on one file with `tunesmith evaluate`, or train both on the same split.",
        )
    order = np.array([where[key] for key in keys], dtype=np.int64)
    labels, decided = (_renamed(values[order], a, b) for values in (b.labels, b.predicted))
    different = int((labels != a.labels).reshape(len(order), -1).any(axis=1).sum())
    if different:
        raise DataError(
            f"{different} of {len(order)} {split} rows have a different label in the other run",
            fix="Train both on the same labels.",
        )
    differ = 0 if a.task is Task.REGRESSION else int((a.predicted != decided).reshape(len(order), -1).any(axis=1).sum())
    # Both as probabilities, or both as decisions when one run kept no probabilities. Labels are those of the runs' thresholds.
    given_a, given_b = a.predicted, decided
    if a.probabilities is not None and b.probabilities is not None:
        given_a, given_b = a.probabilities, b.probabilities[order][:, [b.names.index(name) for name in a.names]]
    how: dict[str, Any] = {
        "scores": "probabilities" if given_a.ndim == 2 else "logits",
        "decisions": (a.predicted, decided),
    }
    return compare_predictions(given_a, given_b, a.labels, task=a.task, metric=metric, **how), differ


def _keys(rows: PredictedRows) -> list[tuple[int, tuple[str, ...]]]:
    """Return what identifies each example: its number and its texts."""
    texts = list(zip(*rows.texts.values(), strict=True)) if rows.texts else [()] * len(rows)
    return [(int(row), tuple(text)) for row, text in zip(rows.row, texts, strict=True)]


def _renamed(values: NDArray[Any], a: PredictedRows, b: PredictedRows) -> NDArray[Any]:
    """Return the labels of B with the ids of A: the same name may have a different id."""
    if a.names == b.names:
        return values
    if a.task is Task.MULTILABEL:
        return values[:, [b.names.index(name) for name in a.names]]
    ids: NDArray[Any] = np.array([a.names.index(name) for name in b.names], dtype=np.int64)[values]
    return ids


def _say(rows: PredictedRows) -> str:
    return f"{rows.task.value} labels {', '.join(rows.names[:6])}" if rows.names else rows.task.value


MAX_RUNS = 8
"""The number of line colors of a picture."""
BOOKKEEPING = ("output_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "report_to", "project", "cache_dir")
"""Options that affect only the place of results."""
SEEDS = ("seed", "data_seed")
SEED_CORRELATION = 0.02
"""Two seeds of one config do not differ on rows independently: groups of rows change their label together.
The assumed correlation of such changes."""
NO_EVIDENCE = "no evidence of a difference"
ABSENT = "(not recorded)"
Tested = tuple[PairedResult, PairedResult, int]
"""The test of these two models, that of their settings, of which each model is one draw, and the number of disagreements."""
ScoreRow = tuple[str, str, str | None, tuple[Headline | None, ...]]
"""Split, metric, the class it is about, and a score for each run."""


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRun:
    """One run. `letter` is its name in sentences and pictures."""

    letter: str
    name: str
    path: Path
    curves: Curves
    scores: list[Headline]
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class PairTest:
    """One run against the first. `result` is None if the examples could not be paired; `sentence` says why, or the result."""

    a: str
    b: str
    split: str | None
    result: PairedResult | None
    p_value: float | None
    """For the settings: with the luck of the seed, and adjusted (Holm) when several runs are tested against the first."""
    different: bool
    sentence: str


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The comparison of several runs."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]
    """Return (option, value of each run) for options that differ."""
    same_options: int
    scores: tuple[ScoreRow, ...]
    tests: tuple[PairTest, ...]
    notes: tuple[str, ...]


def compare_runs(paths: Sequence[str | Path], *, metric: str | None = None, split: str | None = None) -> Comparison:
    """Compare runs. Each is tested against the first on the same examples of one split, with one metric."""
    if not 2 <= len(paths) <= MAX_RUNS:
        raise ConfigError(f"expected 2 to {MAX_RUNS} run folders, got {len(paths)}")
    folders = [open_run(path) for path in paths]
    twice = {f.path.resolve() for f in folders}
    if len(twice) < len(folders):
        raise ConfigError("the same run folder is named twice", fix="Name each run once.")
    configs = [read_run_config(f.config_file) for f in folders]
    summaries = [read_summary(f.data_summary_file) for f in folders]
    for folder in folders:
        verify_results(folder)
    sides = [
        labeled_splits(read_prediction_columns(f.predictions_file), s) for f, s in zip(folders, summaries, strict=True)
    ]
    runs = tuple(_compared(k, folders[k], configs[k]) for k in range(len(folders)))
    differences = _differences(configs)
    found = _test_all(runs, sides, configs[0], metric, split)
    return Comparison(
        runs=runs,
        differences=differences,
        same_options=len({k for c in configs for k in c} - set(BOOKKEEPING)) - len(differences),
        scores=_score_table(runs),
        tests=found,
        notes=_notes(differences, configs, found),
    )


def _compared(k: int, folder: RunDir, config: Mapping[str, Any]) -> ComparedRun:
    curves = load_curves(folder.path)
    letter = chr(ord("A") + k)
    return ComparedRun(
        letter=letter,
        name=str(config.get("run_name") or folder.name),
        path=folder.path,
        curves=dataclasses.replace(curves, name=letter),
        scores=headline_scores(read_metrics(folder.metrics_file), curves),
        findings=diagnose_run(folder, curves),
    )


def _differences(configs: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names = [n for n in dict.fromkeys(n for c in configs for n in c) if n not in BOOKKEEPING]
    rows = [(name, tuple(say_value(c.get(name, ABSENT)) for c in configs)) for name in names]
    return tuple((name, values) for name, values in rows if len(set(values)) > 1)


def _score_table(runs: Sequence[ComparedRun]) -> tuple[ScoreRow, ...]:
    by_run = [{(s.split, s.name, s.of): s for s in run.scores} for run in runs]
    keys = sorted(dict.fromkeys(key for found in by_run for key in found), key=lambda key: split_rank(key[0]))
    return tuple((*key, tuple(found.get(key) for found in by_run)) for key in keys)


def _test_all(
    runs: Sequence[ComparedRun],
    sides: Sequence[Mapping[str, PredictedRows]],
    config: Mapping[str, Any],
    metric: str | None,
    split: str | None,
) -> tuple[PairTest, ...]:
    shared = [name for name in sides[0] if all(name in own for own in sides)]
    wanted = split or (shared[0] if shared else None)
    results: list[Tested | DataError] = []
    for other in sides[1:]:
        try:
            if wanted not in shared:
                raise DataError(_no_rows(wanted, sides, runs))
            first = sides[0][wanted]
            name = metric or main_metric(first.task, config)
            found, differ = compare_rows(first, other[wanted], split=wanted, metric=name)
            results.append((found, with_seeds(found, differ), differ))
        except DataError as error:
            results.append(error)
    adjusted = _holm([None if isinstance(r, DataError) else r[1].p_value for r in results])
    made = zip(runs[1:], results, adjusted, strict=True)
    return tuple(_pair_test(runs[0], run, wanted, result, p, len(results)) for run, result, p in made)


def _no_rows(split: str | None, sides: Sequence[Mapping[str, PredictedRows]], runs: Sequence[ComparedRun]) -> str:
    empty = [run.letter for run, own in zip(runs, sides, strict=True) if not own]
    if empty:
        return f"no labeled predictions in predictions.parquet of {', '.join(empty)}: was the run finished?"
    return f"no split with labeled predictions in every run{f' is called {split!r}' if split else ''}"


def main_metric(task: Task, config: Mapping[str, Any]) -> str:
    """Return the metric that selected the checkpoint of the first run if it is defined per example, else the task's first."""
    tracked = canonical_name(str(config.get("metric_for_best_model") or ""))
    return tracked if tracked in metric_names(task) else DEFAULTS[task][0]


def _holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p values with Holm's adjustment: with k tests, the chance of any false alarm stays at the level."""
    known = sorted((p, k) for k, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, k) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[k] = highest
    return adjusted


def with_seeds(result: PairedResult, disagreements: int) -> PairedResult:
    """Return the test for two settings with one seed each: a wider interval and a larger p value.

    With correlation r among the rows on which the two disagree, their difference varies sqrt(1 + r (rows - 1)) times as
    much as independent rows would (the design effect of cluster samples).
    """
    if result.p_value is None or result.difference is None or result.low is None or result.high is None:
        return result
    factor = math.sqrt(1 + SEED_CORRELATION * max(0, disagreements - 1))
    normal = NormalDist()
    z = -normal.inv_cdf(max(result.p_value, 1e-300) / 2) / factor
    low = result.difference - factor * (result.difference - result.low)
    high = result.difference + factor * (result.high - result.difference)
    return dataclasses.replace(result, p_value=min(1.0, 2 * normal.cdf(-z)), low=low, high=high)


def _pair_test(
    a: ComparedRun, b: ComparedRun, split: str | None, tested: Tested | DataError, p: float | None, tests: int
) -> PairTest:
    if isinstance(tested, DataError):
        return PairTest(a.letter, b.letter, split, None, None, False, f"not tested: {tested}")
    models, result, disagreements = tested
    if p is None or result.difference is None or result.low is None or result.high is None:
        return PairTest(a.letter, b.letter, split, result, None, False, f"{result.metric} is not defined on these rows")
    different = p <= LEVEL
    shown_p = f"p = {p:.2g}{f' (Holm, {tests} tests)' if tests > 1 else ''}"
    if models.p_value is not None and disagreements:
        shown_p += f" for the settings, {models.p_value:.2g} for these two models"
    low, high = (result.low, result.high) if different else (min(result.low, 0.0), max(result.high, 0.0))
    numbers = f"{result.metric} {result.difference:+.3f} [{low:+.3f}, {high:+.3f}], {shown_p}, "
    numbers += f"{result.n:,} {split} rows, {result.method}"
    better = (result.difference > 0) == greater_is_better(result.metric)
    words = NO_EVIDENCE
    if different:
        words = f"{b.letter} is {'better' if better else 'worse'} than {a.letter}"
    elif models.p_value is not None and models.p_value <= LEVEL:
        words = f"{NO_EVIDENCE} beyond the variation between seeds"
    result = dataclasses.replace(result, low=low, high=high)
    return PairTest(a.letter, b.letter, split, result, p, different, f"{words}: {numbers}")


def _notes(
    differences: Sequence[tuple[str, tuple[str, ...]]], configs: Sequence[Mapping[str, Any]], tests: Sequence[PairTest]
) -> tuple[str, ...]:
    names = {name for name, _ in differences}
    notes = []
    if not all(configs):
        notes.append("The options of a run without run.yaml are unknown.")
    elif not names:
        notes.append("All options are the same.")
    elif names <= set(SEEDS):
        notes.append("The runs differ only in their seed: the difference is due to chance, not to a setting.")
    if any(t.different for t in tests) and not names <= set(SEEDS):
        notes.append(
            "Each setting has only one run, so the variation between seeds is estimated from other "
            "models. Train two or three seeds of each setting to measure it."
        )
    if any(t.split == "validation" and t.result is not None for t in tests):
        notes.append("The validation rows also selected each run's best step. Prefer a test split.")
    return tuple(notes)
