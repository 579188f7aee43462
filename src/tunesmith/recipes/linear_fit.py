"""A linear model on fixed features, in closed form: ridge regression with exact leave-one-out predictions, then a scale and
a shift for each class, so that they are logits. One eigendecomposition gives every penalty and every left-out row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tunesmith.labels import Task

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
    x, y = features.double(), _targets(labels, task, classes).to(features.device)
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


def _targets(labels: torch.Tensor, task: Task, classes: int) -> torch.Tensor:
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
