"""The pair warm-up: before training on text pairs, distill the frozen encoder's separate text embeddings into the pair model.

Sentence encoders are trained to embed one text at a time, but a pair classifier reads both texts together and cannot use that
similarity. The warm-up teaches the joint model the pairwise features of the separate embeddings (absolute difference, product,
cosine). It uses no labels: pairs are made of the texts of the training examples. The steps are ordinary training steps; a
checkpoint contains their result, so a resumed run does not repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from tunesmith.data.batches import Batch, Batches
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.events import StepDone
from tunesmith.labels import LabelMap
from tunesmith.models.pooling import last_linear
from tunesmith.pipeline.probe import (
    FrozenFeatures,
    LinearFit,
    LoadedRun,
    ProbeResult,
    fit_linear,
    frozen_features,
    is_known,
    rows_to_see,
    targets_of,
)
from tunesmith.pipeline.watch import PAIR_STAGE
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

PAIRS_IN_A_STEP = 32
MOST_READ = 4000
"""Examples whose texts the pairs are made of."""
MOST_PAIRS = 40_000
REAL, NEAR, NEAREST = 0.25, 0.4, 12
"""Shares of pairs that are real examples, and of pairs of a text with one of its nearest neighbors; the rest is random."""


@dataclass(frozen=True)
class PairReadings:
    """`vectors[side][i]`: the embedding, of length 1, of the text `texts.sides[side][i]`."""

    texts: PairTexts
    vectors: tuple[torch.Tensor, torch.Tensor]


def look_at_pairs(run: LoadedRun, probe: ProbeResult | None, *, asked: bool) -> tuple[PairReadings | None, str]:
    """Return the separate embeddings if a warm-up should use them, else None, and the reason.

    If the user requested the warm-up, it is not compared with the probe.
    """
    train = run.splits["train"]
    if train.labels is None or not is_known(train.labels).all():
        return None, "some examples have no label"
    if probe is None and not asked:
        return None, "too few examples for a linear probe"
    try:
        last_linear(run.model)
    except ConfigError as error:
        return None, error.problem
    together = None if probe is None or asked else probe.fit
    return read_alone(train, rows_to_see(len(train)), run.bundle.labels, partial(frozen_features, run), together)


def read_alone(
    rows: TokenRows,
    seen: npt.NDArray[np.int64],
    labels: LabelMap,
    read: Callable[[TokenRows], FrozenFeatures],
    together: LinearFit | None,
) -> tuple[PairReadings | None, str]:
    """Return the embeddings of both texts, or None, and the reason.

    A linear model of the pairwise features must explain the labels of the examples `seen` better than `together`, the model of
    jointly encoded pairs, and significantly better than a constant. Without `together` it is not compared.
    """
    some = rows.select(seen)
    texts = PairTexts.of(some)
    if texts is None:
        return None, "examples have one text"
    assert some.labels is not None
    known = torch.from_numpy(some.labels)
    sides = [read(texts.alone(side)) for side in (0, 1)]
    fits = {
        name: fit_linear(compare_sides(*_unit(sides, name)), known, labels.task, len(labels))
        for name in ("first", "mean")
    }
    best = max(fits, key=lambda name: fits[name].explained)
    why = f"R2 of held-out examples {fits[best].explained:.2f} from separate text embeddings"
    if together is not None:
        why += f", {together.explained:.2f} from joint encoding"
        values = targets_of(known, labels.task, len(labels)).to(fits[best].errors.device)
        gain = (values - values.mean(0)).square().mean(1) - fits[best].errors
        sure = float(gain.mean()) > 2 * float(gain.std()) / len(gain) ** 0.5
        if not sure or fits[best].explained <= together.explained:
            return None, why
    if len(rows) > len(seen):
        drawn = np.random.default_rng(0).choice(len(rows), min(len(rows), MOST_READ), replace=False)
        texts = PairTexts.of(rows.select(np.sort(drawn)))
        if texts is None:
            return None, "some examples have one text"
        sides = [read(texts.alone(side)) for side in (0, 1)]
    return PairReadings(texts, _unit(sides, best)), why


def warm_up_on_pairs(run: LoadedRun, readings: PairReadings, *, steps: int, learning_rate: float) -> None:
    """Train the model in place; its last layer is restored afterwards."""
    model, seed = run.model, run.config.seed
    pairs = make_pairs(readings, min(PAIRS_IN_A_STEP * steps, MOST_PAIRS), seed)
    assert pairs.labels is not None
    layer, width = last_linear(model), pairs.labels.shape[1]
    own = layer.weight, layer.bias
    made = torch.randn(width, layer.in_features, generator=torch.Generator().manual_seed(seed)) * 0.02
    layer.weight = nn.Parameter(made.to(own[0]))
    layer.bias = nn.Parameter(torch.zeros(width).to(own[0]))
    try:
        _take_steps(run, pairs, steps, learning_rate)
    finally:
        layer.weight, layer.bias = own


def _take_steps(run: LoadedRun, pairs: TokenRows, steps: int, learning_rate: float) -> None:
    model, runtime, seed = run.model, run.runtime, run.config.seed
    speedups = apply_speedups(model, pairs, run.padding, device=runtime.device, precision=runtime.precision)
    order = speedups.best_order(runtime.device)
    on_gpu = runtime.device.type == "cuda"
    batches = Batches(
        pairs, speedups.train_collate, PAIRS_IN_A_STEP, seed=seed, sampling=order, ahead=2 * on_gpu, pinned=on_gpu
    )
    count, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=steps, num_epochs=0)
    plan = Plan(count, ends, Schedule("linear", learning_rate, count // 10, count), seed=seed)
    optimizer = make_optimizer(model, learning_rate=learning_rate)
    state = TrainState(model, optimizer, PairLoss(), runtime, speedups=speedups, only_writer=True)
    for event in train_events(state, batches, plan):
        if isinstance(event, StepDone):
            run.watch.progress(PAIR_STAGE, event.step, count)
            if event.step == run.watch.start_steps:
                break
    speedups.close()


class PairLoss:
    """The mean squared error of the pairwise features; the cosine counts as much as all others together."""

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss and the predicted features."""
        found = model(**batch.inputs).logits
        assert batch.labels is not None
        errors = (found.float() - batch.labels).square()
        return errors[:, -1].sum() + errors[:, :-1].mean(1).sum(), found

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """The number of pairs."""
        return float(rows)


def _unit(sides: Sequence[FrozenFeatures], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    u, v = (functional.normalize(getattr(side, name).float(), dim=1) for side in sides)
    return u, v


def make_pairs(readings: PairReadings, count: int, seed: int) -> TokenRows:
    """Rows of two texts whose labels are what two readings say of them, each value with mean 0 and variance 1."""
    u, v = readings.vectors
    rng, rows = np.random.default_rng(seed), len(u)
    near = (u @ v.T).topk(min(NEAREST, rows), dim=1).indices.cpu().numpy()
    first, kind = rng.integers(rows, size=count), rng.random(count)
    second = np.where(kind < REAL, first, rng.integers(rows, size=count))
    close = (kind >= REAL) & (kind < REAL + NEAR)
    second[close] = near[first, rng.integers(near.shape[1], size=count)][close]
    values = compare_sides(u[first], v[second])
    values = (values - values.mean(0)) / values.std(0).clamp_min(1e-6)
    return readings.texts.together(first.tolist(), second.tolist(), values.cpu().numpy())


def compare_sides(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What two readings say of a pair: their distance and product in each dimension, and last their cosine."""
    return torch.cat([(u - v).abs(), u * v, (u * v).sum(1, keepdim=True)], 1)


@dataclass(frozen=True)
class PairTexts:
    """The texts of rows in token ids, without special ones: `sides[0][i]` and `sides[1][i]` are those of row i."""

    sides: tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]
    start: int
    end: int
    between: int
    """How often `end` stands between two texts."""
    second_type: int | None
    """The token type of the second text."""
    longest: int

    @classmethod
    def of(cls, rows: TokenRows) -> PairTexts | None:
        """None unless each row is: start, a text, end, a text, end."""
        whole = rows.columns["input_ids"].take(np.arange(len(rows)))
        start, end = int(whole[0][0]), int(whole[0][-1])
        inner = [np.flatnonzero(ids[1:-1] == end) for ids in whole]
        if not all(len(at) and ids[0] == start and ids[-1] == end for ids, at in zip(whole, inner, strict=True)):
            return None
        twice = all(len(at) > 1 and at[1] == at[0] + 1 for at in inner)
        cuts = [int(at[0]) + 1 for at in inner]
        sides = (
            [ids[1:cut] for ids, cut in zip(whole, cuts, strict=True)],
            [ids[cut + 1 + twice : -1] for ids, cut in zip(whole, cuts, strict=True)],
        )
        types = rows.columns.get("token_type_ids")
        second = None if types is None else int(types.take(np.arange(1))[0][-1])
        return cls(sides, start, end, 1 + twice, second, int(rows.lengths.max()))

    def alone(self, side: int) -> TokenRows:
        """One text of each row, as a row."""
        ids = [[self.start, *text, self.end] for text in self.sides[side]]
        types = {} if self.second_type is None else {"token_type_ids": [[0] * len(row) for row in ids]}
        return TokenRows.from_lists({"input_ids": ids, **types})

    def together(self, first: Sequence[int], second: Sequence[int], values: npt.NDArray[np.float32]) -> TokenRows:
        """Rows of the first text of one row and the second of another; no row is longer than those there were."""
        room = self.longest - 2 - self.between
        rows, types = list[list[int]](), list[list[int]]()
        for i, j in zip(first, second, strict=True):
            a, b = self.sides[0][i], self.sides[1][j]
            a = a[: max(room - len(b), room // 2)]
            b = b[: room - len(a)]
            rows.append([self.start, *a, *[self.end] * self.between, *b, self.end])
            head = 1 + len(a) + self.between
            types.append([0] * head + [self.second_type or 0] * (len(rows[-1]) - head))
        made: dict[str, Any] = {"input_ids": rows, "labels": values}
        return TokenRows.from_lists(made if self.second_type is None else {**made, "token_type_ids": types})
