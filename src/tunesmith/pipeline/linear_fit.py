"""A linear model on the features of a frozen encoder, which one forward pass gives and the disk keeps by content: the first
token's vector and the mean one of each row.

The model is fitted in closed form: ridge regression with exact leave-one-out predictions, then a scale and a shift for each
class, so that they are logits. One eigendecomposition gives every penalty and every left-out row.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.data.batches import Padding, evaluation_batches
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import TunesmithError
from tunesmith.labels import Task
from tunesmith.runs.writing import cache_folder, write_file
from tunesmith.training.distributed import Runtime

log = logging.getLogger(__name__)
TOKENS_IN_A_BATCH = {"cpu": 2048, "cuda": 32_768}


@dataclass(frozen=True)
class FrozenFeatures:
    """`first[i]` and `mean[i]` belong to row i; half precision, as they are kept on disk."""

    first: torch.Tensor
    mean: torch.Tensor


def compute_features(
    model: nn.Module,
    rows: TokenRows,
    padding: Padding,
    runtime: Runtime,
    *,
    on_batch: Callable[[int], None] | None = None,
) -> FrozenFeatures:
    """Runs the encoder without its head over the rows, in evaluation mode. The model is left as it was."""
    bare: Any = model.base_model
    found: dict[str, torch.Tensor] = {}
    limit = TOKENS_IN_A_BATCH.get(runtime.device.type, 2048)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), runtime.autocast():
            for batch in evaluation_batches(rows, padding, max_tokens=limit):
                moved = runtime.move(batch)
                hidden = bare(**moved.inputs).last_hidden_state.float()
                mask = moved.inputs["attention_mask"].unsqueeze(-1).float()
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
                for name, values in (("first", hidden[:, 0]), ("mean", mean)):
                    store = found.setdefault(
                        name, torch.empty(len(rows), values.shape[-1], dtype=torch.half, device=values.device)
                    )
                    store[torch.from_numpy(batch.rows).to(values.device)] = values.half()
                if on_batch is not None:
                    on_batch(len(batch))
    finally:
        model.train(was_training)
    return FrozenFeatures(found["first"], found["mean"])


def cached_features(
    key: str, folder: str | None, rows: TokenRows, compute: Callable[[], FrozenFeatures], device: torch.device
) -> tuple[FrozenFeatures, bool]:
    """What `compute` gives, or gave for the same rows and the same `key` before; and whether it was found."""
    from safetensors.torch import load, save

    root = Path(folder) / "probe" if folder is not None else cache_folder() / "probe"
    file = root / f"{_name_of(key, rows)}.safetensors"
    try:
        stored = load(file.read_bytes())
        if len(stored["first"]) == len(rows) and stored["first"].shape == stored["mean"].shape:
            return FrozenFeatures(stored["first"].to(device), stored["mean"].to(device)), True
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever is wrong with the file, its content can be computed again
        log.warning("features in %s cannot be used (%s); they are computed again", file, error)
    made = compute()
    try:
        os.makedirs(root, exist_ok=True)
        write_file(file, save({"first": made.first.cpu(), "mean": made.mean.cpu()}))
    except (OSError, TunesmithError) as error:
        log.warning("features cannot be kept in %s (%s)", root, error)
    return made, False


def _name_of(key: str, rows: TokenRows) -> str:
    digest = hashlib.sha256(key.encode())
    for name, column in sorted(rows.columns.items()):
        digest.update(name.encode())
        for part in column.take(np.arange(len(rows))):
            digest.update(np.asarray(part, dtype=np.int64).tobytes())
            digest.update(b"|")
    return digest.hexdigest()[:32]


PENALTIES = tuple(10.0**power for power in (-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1))
"""As shares of the features' largest variance: from nearly none to one under which all predictions are the mean."""
_NEWTON_STEPS = 30


@dataclass(frozen=True)
class LinearFit:
    """`features @ weights.T + bias` are logits (the value itself for regression). `held_out[i]` are the logits of row i by a
    model that has not seen row i; `errors[i]` is the squared error of that row before scaling, `explained` their R2."""

    weights: torch.Tensor
    bias: torch.Tensor
    held_out: torch.Tensor
    errors: torch.Tensor
    explained: float

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """The logits of other rows."""
        return features.to(self.weights) @ self.weights.T + self.bias


def fit_linear(features: torch.Tensor, labels: torch.Tensor, task: Task, classes: int) -> LinearFit:
    """Fits all classes at once. The penalty with the smallest leave-one-out error is taken."""
    x, y = features.double(), targets_of(labels, task, classes).to(features.device)
    center, means = x.mean(0), y.mean(0)
    x, y = x - center, y - means
    values, vectors = torch.linalg.eigh(x.T @ x)
    values = values.clamp_min(0)
    rotated = x @ vectors
    products = rotated.T @ y
    squares = rotated.square()
    best: tuple[float, torch.Tensor, torch.Tensor] | None = None
    for share in PENALTIES:
        inverse = 1 / (values + share * float(values[-1]) + 1e-12)
        leverage = (squares @ inverse + 1 / len(x)).clamp_max(1 - 1e-6)
        left_out = (y - rotated @ (inverse[:, None] * products)) / (1 - leverage[:, None])
        error = float(left_out.square().mean())
        if best is None or error < best[0]:
            best = (error, left_out, inverse)
    assert best is not None
    error, left_out, inverse = best
    weights = (vectors @ (inverse[:, None] * products)).T
    scores = y - left_out + means
    variance = float(y.square().mean())
    scale, shift = _fit_scale(scores, y + means, task)
    bias = scale * (means - weights @ center) + shift
    explained = 1 - error / variance if variance > 0 else 0.0
    return LinearFit(scale * weights, bias, scale * scores + shift, left_out.square().mean(1), explained)


PENALTY = 1.5
"""Of a logistic model, in mean squared lengths of a row of features: with 8 to 64 rows a label ten and a hundred times less were
worse (docs/research/recipes.md)."""


def fit_logistic(features: torch.Tensor, labels: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and bias of logistic regression with one fixed penalty: few rows cannot choose one."""
    x, y = features.double(), labels.long()
    penalty = PENALTY * float(x.square().sum(1).mean())
    free = torch.zeros(classes, x.shape[1] + 1, dtype=torch.double, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        wrong = torch.nn.functional.cross_entropy(x @ free[:, :-1].T + free[:, -1], y, reduction="sum")
        found = wrong + penalty / 2 * free[:, :-1].square().sum()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return free.detach()[:, :-1], free.detach()[:, -1]


def targets_of(labels: torch.Tensor, task: Task, classes: int) -> torch.Tensor:
    """What a linear model is fitted to: the value, or a column of zeros and ones for each label."""
    if task is Task.REGRESSION:
        return labels.double().reshape(-1, 1)
    if task is Task.MULTILABEL:
        return labels.double()
    return torch.nn.functional.one_hot(labels.long(), classes).double()


def _fit_scale(scores: torch.Tensor, targets: torch.Tensor, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """(one scale, a shift for each class) that make left-out scores the likeliest logits; Newton's method."""
    classes = scores.shape[1]
    free = torch.zeros(classes + 1, dtype=torch.double, device=scores.device)
    if task is Task.REGRESSION:
        return torch.ones_like(free[0]), free[1:]
    free[0] = 1.0
    single = task is not Task.MULTILABEL
    for _ in range(_NEWTON_STEPS):
        logits = free[0] * scores + free[1:]
        p = logits.softmax(1) if single else logits.sigmoid()
        slope = p - targets
        gradient = torch.cat([(slope * scores).sum()[None], slope.sum(0)]) + _PULL * (free - _start(free))
        hessian = _curvature(p, scores, single=single)
        hessian.diagonal().add_(_PULL)
        step = torch.linalg.solve(hessian, gradient)
        free = free - step * min(1.0, 5.0 / float(step.abs().max().clamp_min(1e-12)))
        if float(step.abs().max()) < 1e-6:
            break
    return free[0].clamp_min(0.0), free[1:]


_PULL = 0.1
"""Towards scale 1 and no shift, so that few rows or classes told apart perfectly give no infinite logits."""


def _start(free: torch.Tensor) -> torch.Tensor:
    start = torch.zeros_like(free)
    start[0] = 1.0
    return start


def _curvature(p: torch.Tensor, scores: torch.Tensor, *, single: bool) -> torch.Tensor:
    """The second derivatives of the summed loss by scale and shifts."""
    weighted = p * scores
    mean = weighted.sum(1, keepdim=True)
    if single:
        corner = (weighted * scores).sum() - mean.square().sum()
        edge = (weighted - p * mean).sum(0)
        block = torch.diag(p.sum(0)) - p.T @ p
    else:
        spread = p * (1 - p)
        corner, edge, block = (spread * scores.square()).sum(), (spread * scores).sum(0), torch.diag(spread.sum(0))
    out = torch.empty(len(edge) + 1, len(edge) + 1, dtype=p.dtype, device=p.device)
    out[0, 0], out[0, 1:], out[1:, 0], out[1:, 1:] = corner, edge, edge, block
    return out
