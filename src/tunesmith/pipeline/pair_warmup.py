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

from tunesmith.data.batches import Batch, Batches, TokenRows
from tunesmith.errors import ConfigError
from tunesmith.events import StepDone
from tunesmith.labels import LabelMap
from tunesmith.models.pooling import Pooling, last_linear
from tunesmith.pipeline.probe import (
    FEWEST_ROWS,
    FrozenFeatures,
    LoadedRun,
    choose_pooling,
    fit_linear,
    frozen_features,
    is_known,
)
from tunesmith.pipeline.train import PAIR_STAGE
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


def read_pairs(run: LoadedRun) -> tuple[PairReadings | None, str]:
    """Return the separate embeddings of the training texts, and what they say about the labels; None, and why, if impossible."""
    try:
        last_linear(run.model)
    except ConfigError as error:
        return None, error.problem
    return read_alone(run.splits["train"], run.bundle.labels, partial(frozen_features, run))


def read_alone(
    rows: TokenRows, labels: LabelMap, read: Callable[[TokenRows], FrozenFeatures]
) -> tuple[PairReadings | None, str]:
    """Embed both texts of at most MOST_READ examples, pooled as the labels prefer, or as a mean if that is unclear.

    How well the embeddings explain the labels does not decide whether they are used: the warm-up also gained where they explained
    nothing, and cost at most half a point anywhere (docs/research/recipes.md).
    """
    drawn = np.random.default_rng(0).choice(len(rows), min(len(rows), MOST_READ), replace=False)
    some = rows.select(np.sort(drawn))
    texts = PairTexts.of(some)
    if texts is None or some.labels is None:
        return None, "some examples have one text"
    sides = [read(texts.alone(side)) for side in (0, 1)]
    vectors: dict[Pooling, tuple[torch.Tensor, torch.Tensor]] = {name: _unit(sides, name) for name in ("mean", "first")}
    known = np.flatnonzero(is_known(some.labels))
    if len(known) < FEWEST_ROWS:
        return PairReadings(texts, vectors["mean"]), "the examples are text pairs"
    gold = torch.from_numpy(some.labels[known])
    fits = {
        name: fit_linear(compare_sides(u[known], v[known]), gold, labels.task, len(labels))
        for name, (u, v) in vectors.items()
    }
    pooling, _ = choose_pooling(fits)
    explained = f"R2 of held-out examples {fits[pooling].explained:.2f} from separate text embeddings"
    return PairReadings(texts, vectors[pooling]), explained


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
            run.observer.progress(PAIR_STAGE, event.step, count)
            if event.step == run.observer.start_steps:
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


def _unit(sides: Sequence[FrozenFeatures], name: Pooling) -> tuple[torch.Tensor, torch.Tensor]:
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
