"""For which optimizers a cut vocabulary is exact, and the way back to the whole table."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from tunesmith.fast.vocabulary import VocabularyCut


def why_inexact(optimizer: Optimizer, parameter: nn.Parameter) -> str | None:
    """Why rows that never have a gradient do more under this optimizer than shrink by `1 - lr * weight_decay`; None if not.

    By class: a subclass, or an optimizer of the user's own, may do anything to a row.
    """
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        return None
    kind, decay = type(optimizer), group.get("weight_decay", 0.0)
    decoupled = kind is AdamW or (kind is Adam and group.get("decoupled_weight_decay", False))
    if decoupled or (kind in (Adam, SGD, RMSprop, Adagrad) and not decay):
        return None
    if kind is SGD and not group["momentum"]:
        return None
    if kind in (Adam, SGD, RMSprop, Adagrad):
        return f"the weight decay of {kind.__name__} goes through its moments, also for tokens that do not occur"
    return f"{kind.__name__} is not an optimizer known to leave alone the rows of tokens that do not occur"


def train_whole_table(cut: VocabularyCut, optimizer: Optimizer) -> nn.Parameter:
    """The whole table in the model and in the optimizer's groups, with the state of the used rows; the parameter comes back."""
    old, new = cut.parameter, cut.restore()
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    known = optimizer.state.pop(old, None)
    if known is not None:
        optimizer.state[new] = {
            k: cut.expand(v).to(v.device) if isinstance(v, torch.Tensor) and v.shape == old.shape else v
            for k, v in known.items()
        }
    return new
