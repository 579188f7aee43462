"""`tunesmith audit RUN --unlabeled FILE --next N`: the examples whose labels would help most, and a forecast of the gain.

Examples are chosen one by one: uncertain under the model, and far from those that are already chosen. Near-duplicates of training
texts and of chosen texts are skipped. The forecast is a power law, fitted to cross-validated scores of a linear probe that was
trained on subsets of the training examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.config.load import load_config
from tunesmith.config.options import Reading
from tunesmith.data.audit import survey_texts
from tunesmith.data.read import read_unlabeled
from tunesmith.data.rows import Part, input_columns
from tunesmith.errors import ConfigError
from tunesmith.inference.model_folder import ModelFacts, model_folder_of, read_facts
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import probabilities_of
from tunesmith.labels import Task
from tunesmith.models.files import load_tokenizer
from tunesmith.pipeline.audit import embed_rows
from tunesmith.pipeline.inputs import load_run_tokenizer, read_run_data
from tunesmith.pipeline.train import RunObserver
from tunesmith.runs.folder import RunDir, best_trial_of

Ints = npt.NDArray[Any]
MOST_CANDIDATES = 10
"""Candidates per requested example: the most uncertain ones."""


@dataclass(frozen=True)
class NextExample:
    """One example to label, with its place in the file and all its columns; `label` is the prediction."""

    place: str
    columns: dict[str, Any]
    label: str
    probability: float


@dataclass(frozen=True)
class NextLabels:
    """The chosen examples, the most helpful first; there are fewer than requested if the rest are near-duplicates."""

    examples: list[NextExample]
    facts: ModelFacts
    duplicates: int
    """Rows that were skipped because they nearly equal a training text."""
    forecasts: tuple[Forecast, ...]
    """Empty if there are too few training examples for a learning curve."""


def label_next(path: str | Path, unlabeled: str, count: int, reading: Reading, observer: RunObserver) -> NextLabels:
    """Return `count` examples of the file to label next. The run must be finished, and its training data still there."""
    run, folder = RunDir(best_trial_of(path)), model_folder_of(path).folder
    if not run.config_file.is_file():
        raise ConfigError("is not a run, so its training examples are not known", where=str(path), fix="Pass a run.")
    facts = read_facts(folder)
    labels, text = facts.labels, facts.text_columns
    if labels.task not in (Task.BINARY, Task.MULTICLASS) or text is None:
        raise ConfigError(f"--next requires one class per example; this is a {labels.task.value} model")
    source = read_unlabeled(Path(unlabeled), text=text, reading=reading)
    rows = source.dataset.num_rows
    if count > rows:
        raise ConfigError(f"--next {count} is more than the {rows} rows of the file", where=unlabeled)
    config = load_config(run.config_file)
    data = read_run_data(config, {}, observer.progress)
    train = data.bundle.splits["train"]
    read = input_columns(text)
    known, new = ([list(table[name]) for name in read] for table in (train, source.dataset))
    groups = group_duplicates(known, new)
    probabilities = probabilities_of(Predictor.load(path).predict_texts(new).logits, labels.task)
    free = np.flatnonzero(groups >= len(train))
    likely = free[np.argsort(-uncertainty(probabilities[free]), kind="stable")][: MOST_CANDIDATES * count]
    texts = [[column[i] for column in new] for i in likely]
    vectors = embed_rows(folder, load_tokenizer(folder), labels, texts, observer)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    picked = choose_examples(uncertainty(probabilities[likely]), vectors, groups[likely], count)
    ids = np.asarray(train["labels"])
    some = np.flatnonzero(ids >= 0)
    if len(some) > MOST_ROWS:
        some = np.sort(np.random.default_rng(0).choice(some, MOST_ROWS, replace=False))
    forecasts: tuple[Forecast, ...] = ()
    if len(some) >= FEWEST_ROWS:
        texts = [[column[i] for column in known] for i in some]
        features = embed_rows(data.folder, load_run_tokenizer(config, data.folder), labels, texts, observer)
        curve = measure_curve(features, ids[some])
        forecasts = tuple(forecast_gain(curve, int((ids >= 0).sum()), more) for more in (count, 10 * count))
    examples = []
    for row in likely[picked].tolist():
        best = int(probabilities[row].argmax())
        cells = {name: source.dataset[row][name] for name in source.column_names if name in text or name not in read}
        examples.append(NextExample(source.where(row), cells, labels.names[best], float(probabilities[row, best])))
    return NextLabels(examples, facts, rows - len(free), forecasts)


# Choice


def group_duplicates(known: Sequence[Sequence[str]], new: Sequence[Sequence[str]]) -> Ints:
    """Return one number per new row, equal for near-duplicates; those of training rows are below their count.

    Both are lists of columns.
    """
    from datasets import Dataset

    sides = {"known": known, "new": new}
    parts = {
        name: Part.of(Dataset.from_dict({"text": ["\n".join(row) for row in zip(*columns, strict=True)]}), name)
        for name, columns in sides.items()
    }
    survey = survey_texts(parts, ["text"])
    return survey.of("new", survey.near)[:, 0]


def uncertainty(probabilities: Ints) -> Ints:
    """Return 1 minus the difference of the two largest probabilities of each row."""
    top = np.sort(probabilities, axis=1)[:, -2:]
    found: Ints = 1 - (top[:, 1] - top[:, 0])
    return found


def choose_examples(unsure: Ints, vectors: Ints, groups: Ints, count: int) -> list[int]:
    """Return at most `count` rows by greedy k-center: the largest uncertainty times the distance to the nearest chosen row.

    `vectors` have length 1. Only one row of each group is chosen.
    """
    chosen: list[int] = []
    distance = np.ones(len(unsure))
    free = np.ones(len(unsure), bool)
    while len(chosen) < count and free.any():
        best = int(np.where(free, unsure * distance, -1.0).argmax())
        chosen.append(best)
        distance = np.minimum(distance, 1 - vectors @ vectors[best])
        free &= groups != groups[best]
    return chosen


# Forecast


MOST_ROWS, FEWEST_ROWS = 2_000, 50
"""Training examples for the learning curve: at most an even sample of this size, and not fewer than this."""
FOLDS, REPEATS, SIZES, DRAWS = 5, 4, 6, 1_000
EXPONENTS = np.array([0.25, 0.35, 0.5, 0.7, 1.0])
"""Exponents of the power laws that are tried."""
STRENGTH = 10.0
"""Inverse penalty of the linear probe, for features whose mean squared length is 1 (docs/research/label_next.md)."""
WIDER = 2.0
"""Factor for the variation between training sets: without it, the intervals were too narrow on development tasks."""


@dataclass(frozen=True)
class Curve:
    """Cross-validated scores by training-set size. `right[repeat, size, example]`: the held-out prediction is correct."""

    sizes: Ints
    right: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Forecast:
    """Expected gain of accuracy from `more` labels, in points, with a 90% interval."""

    more: int
    gain: float
    low: float
    high: float

    def line(self) -> str:
        """Return "50 more labels: +1.4 points of accuracy (0.6 to 2.1)"."""
        return f"{self.more} more labels: {self.gain:+.1f} points of accuracy ({self.low:.1f} to {self.high:.1f})"


def fit_probe(features: Ints, ids: Ints) -> Any:
    """Return a function from features to predicted ids."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(ids)) < 2:
        return lambda others: np.full(len(others), ids[0])
    return LogisticRegression(C=STRENGTH, max_iter=1_000).fit(features, ids).predict


def scale_features(features: Ints) -> Ints:
    """Return centered features with a mean squared length of 1."""
    centered = features - features.mean(0)
    scaled: Ints = centered / max(float(np.sqrt((centered**2).sum(1).mean())), 1e-12)
    return scaled


def measure_curve(features: Ints, ids: Ints, *, seed: int = 0) -> Curve:
    """Score the linear probe on nested subsets of the training examples, by repeated cross-validation."""
    rng, count = np.random.default_rng(seed), len(ids)
    features = scale_features(features)
    most = count - -(-count // FOLDS)
    sizes = np.unique(np.geomspace(max(most // 16, 10), most, SIZES).astype(np.int64))
    right = np.zeros((REPEATS, len(sizes), count), bool)
    for repeat in range(REPEATS):
        for held_out in np.array_split(rng.permutation(count), FOLDS):
            rest = rng.permutation(np.setdiff1d(np.arange(count), held_out))
            for place, size in enumerate(sizes):
                predict = fit_probe(features[rest[:size]], ids[rest[:size]])
                right[repeat, place, held_out] = predict(features[held_out]) == ids[held_out]
    return Curve(sizes, right)


def forecast_gain(curve: Curve, count: int, more: int, *, seed: int = 0) -> Forecast:
    """Forecast the gain from `more` labels in addition to `count`.

    The interval bootstraps examples and repeats, and adds the variation between training sets of the same size.
    """
    rng = np.random.default_rng(seed)
    repeats, _, examples = curve.right.shape
    errors = 1.0 - curve.right.mean(axis=(0, 2))
    drawn = np.empty((DRAWS, len(curve.sizes)))
    by_repeat = 1.0 - curve.right
    for draw in range(DRAWS):
        weights = np.bincount(rng.integers(examples, size=examples), minlength=examples) / examples
        drawn[draw] = (by_repeat[rng.integers(repeats, size=repeats)] @ weights).mean(0)
    gain = 100 * power_law_gain(curve.sizes, errors[None], count, more)[0]
    gains = 100 * power_law_gain(curve.sizes, drawn, count, more)
    # Folds share few examples while training sets are small, so that each repeat averages FOLDS independent sets.
    small = curve.sizes <= curve.sizes[-1] / 2
    spread = by_repeat.mean(2).std(axis=0, ddof=1)[small] * np.sqrt(FOLDS * curve.sizes[small] / count)
    gains += rng.normal(0.0, WIDER * 100 * float(spread.mean()) * np.sqrt(more / (count + more)), DRAWS)
    low, high = np.quantile(gains, (0.05, 0.95))
    return Forecast(more, float(gain), float(low), float(high))


def power_law_gain(sizes: Ints, errors: Ints, count: int, more: int) -> Ints:
    """Fit error = c + a * size**-b with a, c >= 0 to each row of errors; return the drop from `count` to `count + more`."""
    best = np.full(len(errors), np.inf)
    gains = np.zeros(len(errors))
    for b in EXPONENTS:
        x = sizes ** -float(b)
        a = ((errors - errors.mean(1, keepdims=True)) @ (x - x.mean())) / ((x - x.mean()) ** 2).sum()
        c = errors.mean(1) - a * x.mean()
        a = np.where(c < 0, errors @ x / (x @ x), np.maximum(a, 0.0))
        c = np.where(c < 0, 0.0, errors.mean(1) - a * x.mean())
        missed = ((errors - c[:, None] - a[:, None] * x) ** 2).sum(1)
        gains = np.where(missed < best, a * (count ** -float(b) - (count + more) ** -float(b)), gains)
        best = np.minimum(best, missed)
    return gains
