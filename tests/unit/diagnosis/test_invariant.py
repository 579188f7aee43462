"""A run whose score doesn't exceed the constant baseline by more than its error is never healthy, for any task."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tunesmith.diagnosis.reading import gain_of_score, read_curves, turned
from tunesmith.diagnosis.verdict import CODES, diagnose_curves
from tunesmith.events import Evaluated, Event, RowsEvaluated, RunEnded, RunStarted, StepDone
from tunesmith.labels import Task
from tunesmith.metrics.evidence import BestConstant, RowEvidence, encode_rows, keep_rows, row_losses
from tunesmith.runs.event_log import curves_from_events

WIDTH = {Task.BINARY: 2, Task.MULTICLASS: 6, Task.MULTILABEL: 5, Task.REGRESSION: 1}


def make_labels(task: Task, rows: int, draw: np.random.Generator) -> np.ndarray:
    if task is Task.REGRESSION:
        return draw.normal(2, 1, rows)
    if task is Task.MULTILABEL:
        return (draw.random((rows, 5)) < draw.uniform(0.05, 0.7, 5)).astype(np.float64)
    return draw.choice(WIDTH[task], rows, p=draw.dirichlet(np.full(WIDTH[task], 2.0)))


def make_logits(
    task: Task, labels: np.ndarray, constant: BestConstant, skill: float, draw: np.random.Generator, noise_size: float
) -> np.ndarray:
    """Return logits that predict the labels with this skill, close to or far from the constant baseline's."""
    noise = draw.normal(size=(len(labels), WIDTH[task])) * noise_size
    if task is Task.REGRESSION:
        return constant.logits(len(labels)) + noise + skill * (labels[:, None] - labels.mean())
    truth = labels if task is Task.MULTILABEL else np.eye(WIDTH[task])[labels.astype(int)]
    return constant.logits(len(labels)) + noise + skill * 4 * (truth - truth.mean(axis=0))


def make_run(task: Task, seed: int, skills: list[float], rows: int = 200, noise: float = 0.3) -> list[Event]:
    """Make one evaluation per epoch with these skills; training always improves."""
    draw = np.random.default_rng(seed)
    labels, steps = make_labels(task, rows, draw), 40
    constant = BestConstant.of(task, make_labels(task, 900, np.random.default_rng(seed)), WIDTH[task])
    total = steps * len(skills)
    events: list[Event] = [RunStarted("run", 0, total, float(steps), float(len(skills)), 640)]
    for epoch, skill in enumerate(skills, start=1):
        for split, known in (("validation", skill), ("train_sample", 0.2 * epoch)):
            logits = make_logits(task, labels, constant, known, draw, noise)
            loss = float(row_losses(task, logits, labels).mean())
            if split == "validation":
                for k in range(steps):
                    step = steps * (epoch - 1) + k + 1
                    rate = 1e-4 * (1 - step / total)
                    events.append(StepDone(step, step / steps, loss * draw.uniform(0.7, 1.2), 1.0, rate, 16, 400, 400))
            kept = keep_rows(constant, logits, labels)
            assert kept is not None
            events.append(RowsEvaluated(steps * epoch, split, encode_rows(kept)))
            events.append(Evaluated(steps * epoch, float(epoch), split, {"loss": loss}, rows))
    return [*events, RunEnded(total, "completed")]


@pytest.mark.parametrize("task", list(Task))
def test_run_at_chance_level_is_never_healthy(task: Task) -> None:
    said = set()
    for seed in range(60):
        draw = np.random.default_rng(seed)
        skills = [*draw.uniform(0, 0.6, draw.integers(0, 5)).tolist(), float(draw.choice([-0.3, 0.0, 0.0, 0.03]))]
        curves = curves_from_events(
            make_run(task, seed, skills, int(draw.integers(25, 400)), float(draw.choice([0.01, 0.3, 2.0])))
        )
        reading = read_curves(curves, {})
        assert reading.rows is not None
        config = {
            "learning_rate": float(10 ** draw.uniform(-7, -2)),
            "freeze": draw.choice(["", "encoder"], 1).tolist(),
        }
        found = diagnose_curves(curves, config)
        said.add(found[0].code)
        if gain_of_score(reading.rows.validation[-1]).z <= 2:
            assert found[0].code != "healthy", (seed, found[0])
    assert len(said) > 2, "the runs differ"
    assert said <= set(CODES)


@pytest.mark.parametrize("task", list(Task))
def test_run_that_learns_well_is_healthy_for_every_task(task: Task) -> None:
    curves = curves_from_events(make_run(task, 3, [0.35, 0.8, 0.9], rows=400))
    found = diagnose_curves(curves, {"learning_rate": 1e-4, "per_device_train_batch_size": 16})
    assert found[0].code == "healthy", found[0]


def test_only_curves_at_chance_are_never_healthy(synthetic: SimpleNamespace) -> None:
    counts = {"a": 2474, "b": 1194}
    for seed in range(40):
        draw = np.random.default_rng(seed)
        n, epochs = int(draw.integers(30, 2000)), int(draw.integers(3, 9))
        edge = 0.6745 + 2 * np.sqrt(0.6745 * 0.3255 / n)
        scores = [*draw.uniform(0.5, 0.95, epochs - 1).tolist(), float(draw.uniform(0.4, edge - 1e-6))]
        losses = draw.uniform(0.2, 0.9, epochs).tolist()
        run = synthetic.make_run(draw.uniform(0.05, 0.7, epochs).tolist(), losses, accuracy=scores, n=n, seed=seed)
        assert diagnose_curves(curves_from_events(run), synthetic.CONFIG, label_counts=counts)[0].code != "healthy"


def test_close_verdicts_are_listed_with_probability() -> None:
    curves = curves_from_events(make_run(Task.BINARY, 5, [0.0, 0.0, 0.01], rows=300))
    found = diagnose_curves(curves, {"learning_rate": 1e-5, "per_device_train_batch_size": 16})[0]
    likely = found.numbers["likelihoods"]
    assert sum(likely.values()) == pytest.approx(1.0, abs=0.25)
    assert list(likely.values()) == sorted(likely.values(), reverse=True)
    close = [code for code, p in likely.items() if p >= 0.15 and code != found.code]
    assert close
    assert list(found.numbers["close"]) == close[:2]
    assert all(code.replace("_", " ") in found.doubt for code in close[:2])


def evidence_of(labels: np.ndarray, predictions: np.ndarray, width: int) -> RowEvidence:
    constant = BestConstant.of(Task.MULTICLASS, labels, width)
    kept = keep_rows(constant, 4.0 * np.eye(width)[predictions], labels)
    assert kept is not None
    return kept


@pytest.mark.parametrize("width", [2, 6])
def test_swapped_labels_differ_from_hard_task_and_noise(width: int) -> None:
    draw, said = np.random.default_rng(0), []
    for share in (0.9, 0.3, 0.0):
        labels = draw.choice(width, 400, p=draw.dirichlet(np.full(width, 5.0)))
        guesses = draw.permutation(labels)
        predictions = np.where(draw.random(400) < share, labels, guesses)
        said.append(turned(evidence_of(labels, predictions, width)))
        said.append(-turned(evidence_of((labels + 1) % width, predictions, width)) if share > 0.5 else -2.0)
    assert max(said) < 1, "correct predictions, a hard task and chance level are not detected"
    assert min(said[1::2]) < -1, "shifted labels are detected"


def test_too_few_validation_examples_are_reported() -> None:
    """Training examples are learned; the validation score may be that of the constant baseline or far above."""
    codes = []
    for seed in range(12):
        curves = curves_from_events(make_run(Task.BINARY, seed, [0.1, 0.12, 0.12], rows=40, noise=0.6))
        found = diagnose_curves(curves, {"learning_rate": 1e-4, "per_device_train_batch_size": 16})[0]
        codes.append(found.code)
        if found.code == "not_enough_evidence":
            assert "40 validation examples are too few" in found.evidence
            assert found.severity == "info"
            assert found.advice[0].startswith("--folds 5")
            held = diagnose_curves(curves, {"learning_rate": 1e-4, "validation_file": "v.csv"})[0]
            assert "--folds" not in held.advice[0], "folds create the validation rows"
    assert "not_enough_evidence" in codes


def test_rows_without_an_evaluation_are_not_enough_evidence() -> None:
    """An event log without evaluations but with their examples, as in fuzz case 1:222."""
    events = [e for e in make_run(Task.BINARY, 5, [0.5, 0.6]) if not isinstance(e, Evaluated)]
    assert diagnose_curves(curves_from_events(events), {})[0].code == "not_enough_evidence"
