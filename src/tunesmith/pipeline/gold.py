"""Gold labels: a few hundred human labels for training data that a language model or another program has labeled.

    bundle, gold = take_gold(bundle)    # when data is read: refuse overlaps, count agreement, validation and test roles
    run = correct_labels(run, gold)     # before the recipe is chosen: probabilities for the training labels, if they help

Every score of the run is on gold labels. The confusion matrix P(machine label | true label) is estimated from two sources: gold
examples whose machine label is in the column `llm_label`, and the training examples. For the latter, a linear probe predicts
each example without having seen it, and its predictions are calibrated on gold examples; the matrix is the most likely one if
machine labels depend only on the true label. They say how probable each class is, given the machine label and the prediction.
If another class is probable enough, these probabilities replace the training label. The gold examples of the test role take no
part in this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.labels import with_targets
from tunesmith.data.read import DataBundle
from tunesmith.data.rows import TARGETS, Part, draw_split, fingerprint_parts, fold_cells
from tunesmith.errors import ConfigError, DataError, did_you_mean, first_few
from tunesmith.labels import Task
from tunesmith.metrics.table import softmax, wilson_pair

if TYPE_CHECKING:
    from tunesmith.pipeline.probe import LoadedRun

Array = npt.NDArray[Any]
MACHINE_COLUMN = "llm_label"
"""Column of the gold file with the labels of the machine."""
UNKNOWN = -1
SHOWN = 10
"""Labels whose agreement is printed, those with the most errors; data_summary.json has all."""
PRIOR_ROWS, PRIOR_RIGHT = 25.0, 0.9
"""Before any example is seen, the matrix counts as known from this many examples per class, of which this share is right. Without
it, features that say little about the labels would allow any matrix."""
SURE = 0.8
"""A machine label is corrected if another class has at least this probability (docs/research/machine_labels.md)."""
ROUNDS = 50
FOLDS = 5
FEWEST = 40
"""Gold examples: half of them may be a test split, and with fewer than 20 nothing can be decided."""
DRAWS = 100
"""Bootstrap samples for the interval of an estimated agreement."""


Agreement = dict[str, Any]
"""`right`, `low`, `high` and `n` of all labels; the same by machine label in `by_label`."""


@dataclass(frozen=True)
class Gold:
    """`machine[split]` has the machine's label id of each gold example, UNKNOWN if the file has no such column."""

    machine: dict[str, Array]
    agreement: Agreement | None
    """How often they are right; None without such a column, so that it has to be estimated."""


def take_gold(bundle: DataBundle) -> tuple[DataBundle, Gold]:
    """Return the bundle with the gold examples as validation and test split, and their machine labels.

    Half of them are the test split, drawn by label, unless there is a test file. Gold examples that are also training
    examples and unknown labels are a DataError with file, row and column.
    """
    labels, parts = bundle.labels, dict(bundle.parts)
    if labels.task not in (Task.BINARY, Task.MULTICLASS) or TARGETS in parts["train"].encoded.column_names:
        fix = "Omit it, or use one label column with one class per row."
        raise ConfigError("--gold_file needs training data with one certain label per row", fix=fix)
    if "validation" in parts:
        raise ConfigError("--gold_file has the validation labels, and there is a validation split", fix="Omit one.")
    whole = parts.pop("gold")
    if len(whole) < FEWEST:
        problem = f"{len(whole)} gold examples are too few to measure anything"
        raise DataError(problem, where=whole.source.origin, fix=f"Label at least {FEWEST}, better 200 or more.")
    _refuse_training_examples(whole, parts["train"], bundle.columns.text)
    machine = _machine_labels(whole, labels.names, bundle.columns.label)
    human = whole.labels().to_numpy(zero_copy_only=False)
    agreement = None if machine is None else count_agreement(machine, human, labels.names)
    notes = [] if agreement is None else [describe_agreement(agreement, "gold examples")]
    ids = np.full(len(whole), UNKNOWN) if machine is None else machine
    if "test" in parts:
        split = {"validation": np.arange(len(whole))}
    else:
        validation, test, _ = draw_split(
            whole, val_fraction=0.5, seed=0, task=labels.task, text_columns=bundle.columns.text
        )
        split = {"validation": validation, "test": test}
    shown = " and ".join(f"{len(rows):,} as {name} examples" for name, rows in split.items())
    notes.append(f"Gold: {len(whole):,} labels of {whole.source.origin} are used, {shown}.")
    rest = {name: part for name, part in parts.items() if name != "train"}
    parts = {"train": parts["train"], **{name: replace(whole, rows=rows) for name, rows in split.items()}, **rest}
    _, by_split = fingerprint_parts(parts, bundle.columns.text, labels)
    by_split["validation"] = _digest(by_split["validation"], "gold", ids.tobytes().hex())
    bundle = replace(
        bundle,
        parts=parts,
        splits={name: part.dataset() for name, part in parts.items()},
        notes=(*bundle.notes, *notes),
        fingerprint=_digest(bundle.fingerprint, *by_split.values()),
        split_fingerprints=by_split,
    )
    return bundle, Gold({name: ids[rows] for name, rows in split.items()}, agreement)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _refuse_training_examples(gold: Part, train: Part, text: Sequence[str]) -> None:
    """Refuse gold examples whose texts, except for case and spaces, are those of a training example."""

    def keys(part: Part) -> list[tuple[str, ...]]:
        tables = [[fold_cells(table.column(name)) for name in text] for table in part.scan(list(text))]
        return [key for columns in tables for key in zip(*(cells.to_pylist() for cells in columns), strict=True)]

    places = {key: row for row, key in reversed(list(enumerate(keys(train))))}
    both = [(row, places[key]) for row, key in enumerate(keys(gold)) if key in places]
    if both:
        pairs = [f"  {gold.where(row)}: is {train.where(other)}" for row, other in both[:SHOWN]]
        more = [f"  and {len(both) - SHOWN:,} more"] if len(both) > SHOWN else []
        problem = f"{len(both):,} of {len(gold):,} gold examples are also training examples:"
        fix = "\nRemove them from one of the files: a score on training examples would be too optimistic."
        where = f"{gold.where(both[0][0])}:{','.join(text)}"
        raise DataError("\n".join([problem, *pairs, *more]), where=where, fix=fix)


def _machine_labels(gold: Part, names: tuple[str, ...], label: str) -> Array | None:
    source = gold.source
    if MACHINE_COLUMN not in source.column_names or label == MACHINE_COLUMN:
        if label == MACHINE_COLUMN and "label" in source.column_names:
            fix = (
                f"Rename {label!r} in the training file to 'label': in the gold file, it has the labels of the machine."
            )
            raise DataError(f"which of {label!r} and 'label' are the human labels?", where=source.origin, fix=fix)
        return None
    found = []
    for row, cell in enumerate(source.dataset.with_format(None)[MACHINE_COLUMN]):
        name = str(cell).strip() if cell is not None else ""
        if name not in names:
            problem = f"{name!r} is not one of {first_few(list(names), 20)} (the labels in train)"
            fix = did_you_mean(name, names) or "Write the machine's label for this text."
            raise DataError(problem, where=source.where(row, MACHINE_COLUMN), fix=fix)
        found.append(names.index(name))
    return np.array(found)


# --- agreement --------------------------------------------------------------------------------------------------------


def count_agreement(machine: Array, human: Array, names: tuple[str, ...]) -> Agreement:
    """Return how often machine labels are right, with Wilson intervals: overall, and for each machine label."""

    def share(chosen: Array) -> dict[str, Any]:
        n, right = int(chosen.sum()), int((chosen & (machine == human)).sum())
        low, high = wilson_pair(right / n if n else 0.0, n)
        return {"right": right / n if n else None, "low": low, "high": high, "n": n}

    by_label = {name: share(machine == k) for k, name in enumerate(names)}
    return {**share(np.full(len(machine), True)), "by_label": by_label}


def describe_agreement(found: Agreement, kind: str, how: str = "are right for") -> str:
    """Return the agreement as a sentence; of many labels, those with the most errors."""

    def text(part: dict[str, Any], count: str = "") -> str:
        return f"{part['right']:.0%} ({part['low']:.0%} to {part['high']:.0%}{count})"

    known = {name: part for name, part in found["by_label"].items() if part["right"] is not None}
    counts = {name: f", n={part['n']:,}" for name, part in known.items()}
    worst = sorted(known, key=lambda name: (known[name]["right"] - 1) * known[name]["n"])[:SHOWN]
    listed = ", ".join(f"{name} {text(part, counts[name])}" for name, part in known.items() if name in worst)
    return f"Machine labels {how} {text(found)} of {found['n']:,} {kind}. By machine label: {listed}."


# --- correction -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Examples:
    """Machine labels and out-of-sample logits of training examples; the same of gold examples, with their human labels."""

    train: Array
    train_logits: Array
    gold: Array
    gold_logits: Array
    human: Array

    def pick(self, train: Array, gold: Array) -> _Examples:
        return _Examples(
            self.train[train], self.train_logits[train], self.gold[gold], self.gold_logits[gold], self.human[gold]
        )

    def posterior(self, machine: Array, logits: Array) -> Array:
        """Return the probability of each class for examples with these machine labels and logits."""
        scale, shift, matrix = self.fit()
        found = softmax(scale * logits + shift) * matrix[:, machine].T
        return np.asarray(found / found.sum(axis=1, keepdims=True))

    def correct(self, machine: Array, logits: Array) -> Array:
        """Return machine labels as probabilities: those of `posterior` for each label that is probably wrong."""
        found = self.posterior(machine, logits)
        wrong = (found.argmax(axis=1) != machine) & (found.max(axis=1) >= SURE)
        return np.where(wrong[:, None], found, np.eye(logits.shape[1])[machine])

    def fit(self) -> tuple[float, Array, Array]:
        """Return scale and shift that calibrate logits on gold examples, and the most likely confusion matrix."""
        import torch

        from tunesmith.pipeline.probe import fit_scale, targets_of

        classes = self.train_logits.shape[1]
        human = targets_of(torch.from_numpy(self.human), Task.MULTICLASS, classes)
        scale, shift = (part.numpy() for part in fit_scale(torch.from_numpy(self.gold_logits), human, Task.MULTICLASS))
        known = softmax(scale * self.train_logits + shift)
        wrong = (1 - PRIOR_RIGHT) / (classes - 1)
        counts = PRIOR_ROWS * (wrong + (PRIOR_RIGHT - wrong) * np.eye(classes))
        np.add.at(counts, (self.human[self.gold >= 0], self.gold[self.gold >= 0]), 1.0)
        given = np.eye(classes)[self.train]
        matrix = counts / counts.sum(axis=1, keepdims=True)
        for _ in range(ROUNDS):  # expectation maximization; the likelihood is concave in the matrix
            believed = known * matrix[:, self.train].T
            believed /= believed.sum(axis=1, keepdims=True)
            matrix = counts + believed.T @ given
            matrix /= matrix.sum(axis=1, keepdims=True)
        return float(scale), shift, matrix


def correct_labels(run: LoadedRun, gold: Gold) -> LoadedRun:
    """Return the run with agreement, confusion matrix and decision in its notes, and corrected training labels if they help."""
    targets, lines, facts = run.runtime.gather_objects(find_targets(run, gold) if run.runtime.is_main else None)[0]
    for line in lines:
        run.observer.log(line)
    bundle = replace(run.bundle, notes=(*run.bundle.notes, *lines), gold=facts)
    if targets is None:
        return replace(run, bundle=bundle)
    bundle = replace(bundle, parts={**bundle.parts, "train": with_targets(bundle.parts["train"], targets)})
    train = replace(run.splits["train"], labels=targets.argmax(axis=1))
    return replace(run, bundle=bundle, splits={**run.splits, "train": train})


def find_targets(run: LoadedRun, gold: Gold) -> tuple[Array | None, list[str], dict[str, Any]]:
    """Return probabilities (training examples, classes), sentences, and an entry of data_summary.json.

    The probabilities are None if the machine labels are kept. The decision uses gold examples of the validation split, each with
    a confusion matrix estimated from the others: with machine labels in the gold file, corrected ones must be right more often,
    and a linear probe trained on corrected labels must not be worse by more than one standard error. Without them, the linear
    probe must be better.
    """
    import torch

    from tunesmith.pipeline.probe import fit_linear, frozen_features, rows_to_see

    labels, train, validation = run.bundle.labels, run.splits["train"], run.splits["validation"]
    assert train.labels is not None
    assert validation.labels is not None
    machine, human, classes = train.labels.astype(np.int64), validation.labels.astype(np.int64), len(labels)
    features = frozen_features(run, train, partial(run.observer.progress, "gold labels")).mean
    own, seen = frozen_features(run, validation).mean, rows_to_see(len(train))
    teacher = fit_linear(features[seen], torch.from_numpy(machine[seen]), labels.task, classes)
    logits = teacher.logits(features).cpu().numpy()
    logits[seen] = teacher.held_out.cpu().numpy()
    data = _Examples(machine, logits, gold.machine["validation"], teacher.logits(own).cpu().numpy(), human)

    def predict_gold(targets: Array) -> Array:
        probe = fit_linear(features[seen], torch.from_numpy(targets[seen]), Task.MULTILABEL, classes)
        return probe.logits(own).argmax(dim=1).cpu().numpy()

    before = predict_gold(np.eye(classes)[machine])
    after, relabeled = np.empty_like(human), np.empty_like(human)
    fold = np.random.default_rng(0).permutation(len(human)) % FOLDS
    for k in range(FOLDS):
        inside = fold == k
        others = data.pick(np.arange(len(machine)), np.flatnonzero(~inside))
        after[inside] = predict_gold(others.correct(machine, logits))[inside]
        if gold.agreement is not None:
            relabeled[inside] = others.correct(data.gold[inside], data.gold_logits[inside]).argmax(axis=1)
    gains = (after == human).astype(np.float64) - (before == human)
    scores = f"{(after == human).mean():.1%} instead of {(before == human).mean():.1%}"
    shown = f"a linear probe predicts {scores} of the gold validation examples correctly"
    lines, agreement = [], gold.agreement
    if agreement is None:
        helps = bool(gains.mean() > 0)
        agreement = estimate_agreement(data, labels.names)
        lines.append(describe_agreement(agreement, "training examples", "are right for an estimated"))
    else:
        right = [float((found == human).mean()) for found in (data.gold, relabeled)]
        helps = right[1] > right[0] and bool(gains.mean() >= -gains.std() / len(gains) ** 0.5)
        shown = f"{right[1]:.1%} instead of {right[0]:.1%} of the gold validation examples have the right label, and {shown}"
    targets = data.correct(machine, logits).round(4)
    targets /= targets.sum(axis=1, keepdims=True)
    changed = int((targets.argmax(axis=1) != machine).sum())
    what = f"{changed:,} of {len(machine):,} machine labels are corrected" if helps else "Machine labels are kept"
    lines.append(f"{what}: with the correction, {shown}.")
    facts = {"agreement": agreement, "confusion": data.fit()[2].round(4).tolist(), "corrected": helps}
    return targets if helps else None, lines, facts


def estimate_agreement(data: _Examples, names: tuple[str, ...]) -> Agreement:
    """Return how often machine labels of training examples are probably right, with bootstrap intervals."""

    def shares(some: _Examples) -> Array:
        right = some.posterior(some.train, some.train_logits)[np.arange(len(some.train)), some.train]
        chosen = [np.full(len(right), True), *(some.train == k for k in range(len(names)))]
        return np.array([right[rows].mean() if rows.any() else np.nan for rows in chosen])

    rng = np.random.default_rng(0)
    sizes = len(data.train), len(data.human)
    drawn = [shares(data.pick(*(rng.integers(n, size=n) for n in sizes))) for _ in range(DRAWS)]
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    counts = [len(data.train), *np.bincount(data.train, minlength=len(names)).tolist()]
    parts = [
        {"right": None if n == 0 else float(value), "low": float(a), "high": float(b), "n": n}
        for value, a, b, n in zip(shares(data), low, high, counts, strict=True)
    ]
    return {**parts[0], "by_label": dict(zip(names, parts[1:], strict=True))}
