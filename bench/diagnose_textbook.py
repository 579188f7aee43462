"""Curves as the definition of each verdict has them, drawn at many strengths: bench/diagnose_fit.py fits to them, too.

The real runs have few swings, one kind of divergence, and small encoders only; a person may bring any curve. These have no rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tunesmith.diagnosis.features import Reading, read_curves
from tunesmith.events import Evaluated, Event, Improved, RunEnded, RunStarted, StepDone
from tunesmith.runs.curves import Curves, curves_from_events

DRAWN = 25
CLASSES = ((50, 50), (67, 33), (40, 35, 25), (30, 20, 20, 15, 10, 5), (5,) * 20)


@dataclass
class Case:
    """One epoch per value; losses are shares of the constant's. `hold`: the score does not follow the loss after its lowest."""

    right: tuple[str, ...]
    train: list[float]
    validation: list[float]
    scores: list[float] | None = None
    """Between the constant's (0) and a perfect one (1); None: by the validation loss."""
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    noise: float = 0.0
    rows: int = 0


def _line(pick: random.Random, start: float, end: float, count: int) -> list[float]:
    """From one to the other, fast at first, with a little scatter."""
    return [end + (start - end) * 0.35**k * pick.uniform(0.95, 1.05) for k in range(count - 1)] + [end]


def _cases(pick: random.Random) -> Iterator[Case]:
    """One of each kind."""
    u, count = pick.uniform, pick.randint(3, 7)
    best = u(0.25, 0.75)
    fall, known = _line(pick, u(0.75, 0.95), best, count), _line(pick, u(0.75, 0.95), best * u(0.4, 1), count)
    yield Case(("healthy",), known, fall)
    yield Case(("healthy",), [*known[:-1], 0.9 * known[-1]], [*fall[:-1], best * u(1.0, 1.1)])
    last = {"load_best_model_at_end": False}
    low, heart = u(0.5, 0.8), _line(pick, u(0.6, 0.9), u(0.02, 0.3), count + 1)
    risen = [low * (1.15 if count > 3 else 1), *(low * (1 + k * u(0.22, 0.3)) for k in range(count))]
    held = [0.9 * (1 - low) * u(0.95, 1.05) for _ in risen]
    heart = heart[: len(risen)]
    yield Case(("overfitting",), heart, risen, held, last)
    yield Case(("overfitting",), heart, risen, [v - 0.02 * k for k, v in enumerate(held)], last)
    fallen = [low * (1 + 0.1 * k) for k in range(len(heart))]
    yield Case(("overfitting",), heart, fallen, [v - 0.06 * k for k, v in enumerate(held)], last)
    yield Case(("healthy",), heart, risen, held)
    at_chance = [u(-0.02, 0.02) for _ in range(9)]
    near = [u(0.99, 1.03) for _ in range(count)]
    yield Case(("overfitting",), _line(pick, 0.8, u(0.02, 0.1), count), near, at_chance, rows=pick.randint(50, 200))
    slow = [u(0.96, 1.02) - 0.01 * k for k in range(count)]
    yield Case(("underfitting",), slow, slow, at_chance, {"learning_rate": 10 ** u(-7, -5.5)})
    some = [v - 0.05 for v in slow]
    yield Case(("underfitting",), some, [v + 0.01 for v in some], None, {"freeze": ["encoder"]})
    yield Case(("underfitting", "stopped_too_early"), some, slow, at_chance, steps=pick.randint(4, 9), rows=100)
    for step in (u(0.1, 0.13), u(0.12, 0.15), u(0.13, 0.17)):  # no slower at the end
        gone = [u(0.92, 0.98) - k * step for k in range(pick.randint(3, 4))]
        share = u(0.7, 1.3)
        yield Case(
            ("stopped_too_early",), [v - 0.03 * k for k, v in enumerate(gone)], gone, [(1 - v) ** share for v in gone]
        )
    little = [u(0.94, 0.97) for _ in range(count)]  # a hard task: the loss is a little below the constant's
    yield Case(("underfitting",), _line(pick, 0.92, u(0.75, 0.86), count), little, [v + 0.03 for v in at_chance])
    jumps = [best * (u(1.5, 2.2) if k % 2 else u(0.95, 1.1)) for k in range(pick.randint(5, 9))]
    down = _line(pick, 0.8, best * 0.8, len(jumps))
    yield Case(("erratic",), down, jumps)
    single = {"per_device_train_batch_size": 1}
    yield Case(("erratic",), known, [v * u(1, 1.1) for v in fall], None, single, noise=u(0.9, 1.5))
    high = {"learning_rate": 10 ** u(-3.1, -2)}
    yield Case(("diverged",), near, near, at_chance, high)
    hardly = [u(0.98, 1.02), u(0.93, 0.97), u(0.9, 0.95)]
    yield Case(("diverged", "erratic"), hardly, hardly, None, high)
    rising = [1.0 + 0.01 * k * u(0, 2) for k in range(count)]
    yield Case(("no_signal",), [1 - 0.05 * k * u(0, 1) for k in range(count)], rising, at_chance)
    yield Case(("no_signal",), _line(pick, 1.0, u(0.75, 0.95), count), [v + 0.02 for v in rising], at_chance)
    worse = [1.0 + 0.4 * k * u(0.6, 1.4) for k in range(count)]
    yield Case(("no_signal",), _line(pick, 0.98, u(0.1, 0.6), count), worse, [v - 0.05 for v in at_chance])
    turned = [u(1.3, 2.0) + 0.3 * k for k in range(count)]
    yield Case(("split_mismatch",), known, turned, [u(-0.5, -0.2) - 0.02 * k for k in range(count)])


def _curves(case: Case, pick: random.Random, shares: tuple[int, ...], rate: float) -> Curves:
    chance = -sum(s / 100 * math.log(s / 100) for s in shares)
    steps, held_out = case.steps or pick.randint(40, 150), pick.choice((200, 400, 800))
    total, noise = steps * len(case.train), case.noise or pick.uniform(0.1, 0.3)
    events: list[Event] = [
        RunStarted("run", 0, total, float(steps), len(case.train), case.rows or pick.randint(800, 4000), 0.0)
    ]
    most, best = max(shares) / 100, -math.inf
    for epoch, end in enumerate(case.train):
        begin = case.train[epoch - 1] if epoch else max(1.02, end)
        for k in range(1, steps + 1):
            step, mean = epoch * steps + k, begin + (end - begin) * k / steps
            loss = chance * max(1e-4, mean * (1 + noise * pick.gauss(0, 1)))
            events.append(StepDone(step, step / steps, loss, 2.0, rate * (1 - step / total), 16, 850, 880, 0.05))
        step, done = (epoch + 1) * steps, epoch + 1.0
        gains = [max(0.0, 1 - end) ** 0.7, max(0.0, 1 - case.validation[epoch]) ** 0.7]
        gains[1] = gains[1] if case.scores is None else case.scores[epoch]
        for split, share, gain, n in zip(
            ("train_sample", "validation"), (end, case.validation[epoch]), gains, (192, held_out), strict=True
        ):
            score = min(1.0, max(0.0, most + (1 - most) * gain if gain > 0 else most * (1 + gain)))
            events.append(Evaluated(step, done, split, {"loss": share * chance, "accuracy": score}, n, 0.5))
        if score > best:
            best = score
            events.append(Improved(step, "accuracy", score))
    return curves_from_events([*events, RunEnded(total, "completed", 1.0)])


def textbook_runs() -> Iterator[tuple[tuple[str, ...], Reading]]:
    """(right verdicts, curves as they are read) of every drawn case, the same at each call."""
    pick = random.Random(7)
    for _ in range(DRAWN):
        for case in _cases(pick):
            shares, usual = pick.choice(CLASSES), 10 ** pick.uniform(-4.8, -4)
            options = {"learning_rate": usual, "per_device_train_batch_size": 16, **case.options}
            curves = _curves(case, pick, shares, float(options["learning_rate"]))
            counts = {str(k): 10 * share for k, share in enumerate(shares)}
            yield case.right, read_curves(curves, options, label_counts=counts)
