"""Which batches and models have their embedding block fused, and what the layers then take; plain torch in place of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from equivalence.strategy_cases import (
    PAD,
    RAGGED,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from tunesmith.speedups import fused_embeddings
from tunesmith.speedups.fused_embeddings import EmbeddedTokens, FusedEmbeddings, fuse_embeddings
from tunesmith.speedups.fused_layers import FusedLayers
from tunesmith.speedups.fused_stack import why_not_fused
from tunesmith.speedups.packing import pack
from tunesmith.speedups.padding_free import enable_padding_free
from tunesmith.speedups.steady_tables import enable_steady_tables
from tunesmith.speedups.vocabulary import VocabularyCut

LAYERS = 2
ROWS, LABELS = make_rows(RAGGED), make_labels(len(RAGGED))
Calls = list[Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the kernels are told, call by call; plain torch computes in their place."""
    seen: Calls = []

    class InTorch:
        @staticmethod
        def apply(word: Any, place: Any, kind: Any, gamma: Any, beta: Any, told: Any) -> Any:
            seen.append(told)
            ids, positions, types = told.tokens
            rows = ids if told.rows_of is None else told.rows_of[ids.long()]
            pads = [None if padding < 0 else padding for padding in told.paddings]
            total = functional.embedding(rows, word, pads[0])
            if kind is not None:
                total = total + functional.embedding(torch.zeros_like(ids) if types is None else types, kind)
            total = total + functional.embedding(positions, place, pads[1])
            out = functional.layer_norm(total, gamma.shape, gamma, beta, told.eps)
            return (out, out.to(told.dtype)) if told.copied else out

    monkeypatch.setattr(fused_embeddings, "_Embedded", InTorch)
    monkeypatch.setattr(fused_embeddings, "runs_kernels", lambda ids: True)
    return seen


def fused(model: nn.Module, rows: Any = ROWS, dtype: torch.dtype = torch.float32) -> tuple[FusedLayers, dict[str, Any]]:
    """The layers of a model, and a packed batch for it."""
    free = enable_padding_free(model)
    layers = FusedLayers(model, dtype, first_token_only=True)
    return layers, pack(rows, first_position=free.first_position, keys=free.keys, skipped_id=free.skipped_id)


def embeddings_of(model: nn.Module) -> Any:
    return model.get_submodule(f"{model.base_model_prefix}.embeddings")


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"])
def test_a_packed_batch_runs_fused_with_the_gradients_of_the_padded_model(kind: str, calls: Calls) -> None:
    model, rows = make_model(kind), make_rows(RAGGED, pad=PAD.get(kind, 0))
    rows["input_ids"][3][2] = PAD.get(kind, 0)  # in the middle of a row
    masks = {"attention_mask": (pad_rows(make_rows(RAGGED), kind="bert")["attention_mask"])}
    plain = gradients(model, {**pad_rows(rows, kind=kind), **masks}, LABELS)
    layers, batch = fused(model, rows)
    ours = gradients(model, batch, LABELS)
    assert len(calls) == 1
    assert largest_difference(plain[2], ours[2]) < 1e-5
    layers.disable()
    assert "forward" not in vars(embeddings_of(model))
    gradients(model, batch, LABELS)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["mpnet", "deberta-v2"])
def test_other_blocks_stay_as_transformers_has_them(kind: str, calls: Calls) -> None:
    model = make_model(kind)
    assert fuse_embeddings(model, torch.bfloat16, lambda device, drops: (torch.zeros(1), 0)) is None
    _, batch = fused(model, make_rows(RAGGED, pad=PAD.get(kind, 0)))
    gradients(model, batch, LABELS)
    assert calls == []


def three_kinds(block: Any) -> None:
    block.token_type_embeddings = nn.Embedding(3, 32)


def another_norm(block: Any) -> None:
    class Norm(nn.LayerNorm):
        pass

    block.LayerNorm.__class__ = Norm


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a forward hook on the norm": lambda b: b.LayerNorm.register_forward_hook(lambda m, a, o: None),
    "a hook on the words": lambda b: b.word_embeddings.register_forward_pre_hook(lambda m, a: None),
    "a backward hook on dropout": lambda b: b.dropout.register_full_backward_hook(lambda m, i, o: None),
    "rows of a largest norm": lambda b: setattr(b.word_embeddings, "max_norm", 1e9),
    "gradients by frequency": lambda b: setattr(b.position_embeddings, "scale_grad_by_freq", True),
    "a forward of its own": lambda b: setattr(b.word_embeddings, "forward", b.word_embeddings.forward),
    "three kinds of tokens": three_kinds,
    "another norm": another_norm,
    "all is dropped": lambda b: setattr(b.dropout, "p", 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_runs_as_its_module_does(change: str, calls: Calls) -> None:
    model = make_model("bert")
    _, batch = fused(model)
    CHANGES[change](embeddings_of(model))
    gradients(model, batch, LABELS)
    assert calls == []


def test_tables_in_half_precision_are_left_to_the_module() -> None:
    model = make_model("bert")
    layers, _ = fused(model)
    assert layers._embeddings is not None
    assert layers._embeddings._is_plain(torch.device("cpu"))
    assert not layers._embeddings._is_plain(torch.device("meta"))
    embeddings_of(model).word_embeddings.bfloat16()
    assert not layers._embeddings._is_plain(torch.device("cpu"))


def test_padded_batches_evaluation_and_vectors_are_left_to_the_module(calls: Calls) -> None:
    model = make_model("bert")
    _, batch = fused(model)
    gradients(model, pad_rows(ROWS, kind="bert"), LABELS)
    with torch.no_grad():
        model(**batch)
    vectors = model.get_input_embeddings()(batch["input_ids"]).detach()  # type: ignore[operator]
    model(**{name: value for name, value in batch.items() if name != "input_ids"}, inputs_embeds=vectors)
    assert calls == []


def test_a_cut_table_is_read_through_its_rows_and_the_whole_one_by_its_ids(calls: Calls) -> None:
    model = make_model("bert")
    plain = gradients(model, pad_rows(ROWS, kind="bert"), LABELS)
    _, batch = fused(model)
    cut = VocabularyCut.apply(model, np.unique(np.concatenate(ROWS["input_ids"])))
    enable_steady_tables(model)
    ours = gradients(model, batch, LABELS)
    name = "bert.embeddings.word_embeddings.weight"
    assert calls[0].rows_of is not None
    assert largest_difference(plain[2], {**ours[2], name: cut.expand(ours[2][name])}) < 1e-5
    with cut.whole():
        model(**batch, labels=LABELS).loss.backward()
    assert len(calls) == 2
    assert calls[1].rows_of is None


def test_layers_and_embeddings_share_one_draw_of_seeds(calls: Calls) -> None:
    model = make_model("bert", dropout=0.1)
    _, batch = fused(model, dtype=torch.bfloat16)
    torch.manual_seed(3)
    model(**batch, labels=LABELS)
    torch.manual_seed(3)
    expected = torch.randint(2**62, (3 * LAYERS + 1,))
    assert torch.equal(calls[0].seeds, expected)
    assert (calls[0].call, calls[0].drop, calls[0].copied) == (3 * LAYERS, 0.1, True)


def test_in_half_precision_layers_read_the_copy_and_both_gradients_come_back(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("bert")
    _, batch = fused(model, dtype=torch.bfloat16)
    assert why_not_fused(model) is None, "what was put in is known as ours"
    ours = gradients(model, batch, LABELS)
    monkeypatch.setattr(fused_embeddings, "runs_kernels", lambda ids: False)
    plain = gradients(model, batch, LABELS)
    assert [told.copied for told in calls] == [True]
    assert ours[0] == plain[0]
    assert largest_difference(plain[2], ours[2]) < 1e-6


HOOKS: dict[str, Any] = {
    "nothing": lambda module, args, out: None,
    "another tensor": lambda module, args, out: out * 1.5,
    "in place": lambda module, args, out: out.mul_(1.5),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_layers_take_the_copy_unless_a_hook_on_the_block_changed_what_it_made(
    hook: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("bert")
    _, batch = fused(model, dtype=torch.bfloat16)
    taken: list[EmbeddedTokens | None] = []
    own = FusedEmbeddings.take

    def noted(self: FusedEmbeddings, hidden: torch.Tensor) -> EmbeddedTokens | None:
        taken.append(own(self, hidden))
        return taken[-1]

    monkeypatch.setattr(FusedEmbeddings, "take", noted)
    embeddings_of(model).register_forward_hook(HOOKS[hook])
    model(**batch, labels=LABELS)
    assert len(calls) == 1
    assert (taken[0] is not None) == (hook == "nothing")


def test_a_projection_behind_the_block_gets_no_copy(calls: Calls) -> None:
    model = make_model("electra")
    assert hasattr(model.electra, "embeddings_project")
    _, batch = fused(model, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch, labels=LABELS)
    assert [told.copied for told in calls] == [False]
