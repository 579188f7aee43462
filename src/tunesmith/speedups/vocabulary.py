"""Vocabulary-restricted embeddings: train the rows that occur in the data, keep the rest in closed form; for which optimizers
that is exact, and the way back to the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from tunesmith.errors import CheckpointError
from tunesmith.models.families import is_hooked, replaced_method
from tunesmith.speedups.determinism import look_up


class RestrictedEmbedding(nn.Embedding):
    """A table of the used rows that accepts token ids of the whole table, so that other readers of the ids are unaffected."""

    rows_of: torch.Tensor
    """int32 (whole table): the row of each token id."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of token ids. An id without a row is a bug."""
        if self.rows_of.device != input.device:
            self.rows_of = self.rows_of.to(input.device)
        rows = self.rows_of.index_select(0, input.reshape(-1)).view(input.shape)
        if input.is_cuda:
            return look_up(self.weight, rows, self.padding_idx)
        return functional.embedding(rows, self.weight, self.padding_idx)


class RestrictedVocabulary:
    """A word embedding of which only the used rows are a parameter.

    A row that never occurs has gradient zero, so both Adam moments stay zero, and AdamW does nothing to it but
    `row *= 1 - lr * weight_decay` at each step. `decay` takes these factors and keeps their product. `why_inexact`
    knows for which optimizers that is exact: not for those that mix rows or put the decay into the gradient.
    """

    def __init__(self, model: nn.Module, used_ids: NDArray[np.integer]) -> None:
        """Cut the model's input embedding to `used_ids` (any order, repeats allowed; the padding id is always kept).

        Create the optimizer afterwards: the embedding's parameter is a different one. `why_not_restricted` must be None.
        """
        embedding: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
        self.ids = _with_padding(used_ids, embedding)
        self.size = embedding.num_embeddings
        self._embedding = embedding
        self._ended = False
        self._padding = embedding.padding_idx
        self._lookup = np.full(self.size, len(self.ids), dtype=np.int32)
        self._lookup[self.ids] = np.arange(len(self.ids))
        self._rows_of = torch.from_numpy(self._lookup)
        """Made once, because CUDA graphs read it at its address."""
        table = embedding.weight.detach()
        self._rows = torch.from_numpy(self.ids)
        self._rest = table.to("cpu", copy=True)  # on the host: a device keeps the used rows only
        self.kept = torch.ones((), dtype=torch.float64, device=table.device)
        """Product of the decay factors so far. It is on the device, so that a CUDA graph can update it."""
        self.parameter = nn.Parameter(table[self._rows.to(table.device)].clone(), embedding.weight.requires_grad)
        """The used rows, which the optimizer trains."""
        self.enable()

    def decay(self, factor: float | torch.Tensor) -> None:
        """Note one optimizer step: `factor` is `1 - lr * weight_decay` of the embedding's group (1 if the step was skipped)."""
        if isinstance(factor, torch.Tensor) and factor.device != self.kept.device:  # the model was moved after the cut
            self.kept = self.kept.to(factor.device)
        self.kept.mul_(factor)

    def table(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """Return the whole table as plain training would have it, to save it or, on the device of the model, to evaluate."""
        table = self._rest.to(device, copy=True).mul_(self.kept.to(device, self._rest.dtype))
        table[self._rows.to(device)] = self.parameter.detach().to(device)
        return table

    def enable(self) -> None:
        """Make the used rows the model's table again."""
        self._embedding.__class__ = RestrictedEmbedding
        if self._rows_of.device != self.parameter.device:
            self._rows_of = self._rows_of.to(self.parameter.device)
        vars(self._embedding)["rows_of"] = self._rows_of
        self._install(self.parameter, None if self._padding is None else int(self._lookup[self._padding]))

    def disable(self) -> None:
        """Give the model its whole table, which is not the optimizer's parameter, until `enable`."""
        self._install_whole(self.parameter.requires_grad)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give the model its whole table in this block, for evaluation and `save_pretrained`."""
        if self._ended:
            yield
            return
        self._install_whole(trainable=False)
        try:
            yield
        finally:
            self.enable()

    def restore(self) -> nn.Parameter:
        """Remove the restriction permanently; return the model's new embedding parameter."""
        if not self._ended:
            self._ended = True
            self._install_whole(self.parameter.requires_grad)
        whole = self._embedding.weight
        assert isinstance(whole, nn.Parameter)
        return whole

    def expand(self, compact: torch.Tensor) -> torch.Tensor:
        """Return an Adam moment of the used rows for the whole table: zero in the other rows."""
        whole = torch.zeros(self.size, *compact.shape[1:], dtype=compact.dtype)
        whole[self._rows] = compact.detach().cpu()
        return whole

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the used rows, the other rows before any decay, the ids and the product of the factors.

        `table()` rounds the decay into the rows; resuming from it would round once more than an uninterrupted run.
        """
        stored = self._rest.clone()
        stored[self._rows] = self.parameter.detach().cpu()
        return {"table": stored, "ids": self._rows.clone(), "kept": self.kept.detach().cpu().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; raise CheckpointError for a different vocabulary."""
        if not torch.equal(torch.as_tensor(state["ids"]), self._rows):
            raise CheckpointError(
                f"the checkpoint trains {len(state['ids'])} token ids, the data has {len(self.ids)}, or different ones",
                fix="Resume with the training data of the run.",
            )
        with torch.no_grad():
            self._rest.copy_(state["table"])
            self.parameter.copy_(state["table"][self._rows])
            self.kept.copy_(state["kept"])

    def _install_whole(self, trainable: bool) -> None:
        self._embedding.__class__ = nn.Embedding
        vars(self._embedding).pop("rows_of", None)
        self._install(nn.Parameter(self.table(self.parameter.device), trainable), self._padding)

    def _install(self, weight: nn.Parameter, padding: int | None) -> None:
        self._embedding.weight = weight
        self._embedding.num_embeddings = weight.shape[0]
        self._embedding.padding_idx = padding


def why_not_restricted(model: nn.Module) -> str | None:
    """Return why the whole table must be trained; None if it needn't."""
    try:
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    except NotImplementedError:  # CANINE has none: its characters are hashed
        embedding = None
    if embedding is None or type(embedding) not in (nn.Embedding, RestrictedEmbedding):
        return "its input embedding is not a plain table"
    if replaced_method(embedding) or is_hooked(embedding.weight) or type(embedding.weight) is not nn.Parameter:
        return "its input embedding was changed or has gradient hooks"
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return "its input embedding rescales rows or gradients"
    if sum(parameter is embedding.weight for _, parameter in model.named_parameters(remove_duplicate=False)) > 1:
        return "its input embedding is tied to another layer"
    return None


def _with_padding(used_ids: NDArray[np.integer], embedding: nn.Embedding) -> NDArray[np.int64]:
    """Return the ids sorted, unique, and with the padding id."""
    extra = [] if embedding.padding_idx is None else [embedding.padding_idx]
    ids = np.unique(np.concatenate([np.asarray(used_ids, dtype=np.int64).ravel(), np.array(extra, dtype=np.int64)]))
    assert embedding.num_embeddings > ids[-1] >= ids[0] >= 0, "a token id is outside the model's vocabulary"
    return ids


def why_inexact(optimizer: Optimizer, parameter: nn.Parameter) -> str | None:
    """Return why this optimizer changes rows without gradient by more than `1 - lr * weight_decay`; None if it doesn't.

    By class: a subclass, or a user's optimizer, may do anything to a row.
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
    return f"{kind.__name__} may update embeddings of tokens that do not occur"


def restore_whole_table(cut: RestrictedVocabulary, optimizer: Optimizer) -> nn.Parameter:
    """Put the whole table back into model and optimizer, with the state of the used rows; return the parameter."""
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
