"""The kernels of the embedding block by triton's interpreter, as interpreted.py does for the others; run with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from interpreted_checks import SEEDS, apart, say
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
from tunesmith.speedups import embedding_kernels, fused_embeddings, fused_layers
from tunesmith.speedups.fused_embeddings import _Embedded, _Told
from tunesmith.speedups.packing import pack
from tunesmith.speedups.padding_free import enable_padding_free
from tunesmith.speedups.vocabulary import VocabularyCut

WORDS, PLACES, WIDTH = 23, 30, 52


def by_hand(given: torch.Tensor, keys: torch.Tensor, rows: int) -> torch.Tensor:
    """The sum for each key in float64."""
    twice = torch.cat([given] * (keys.shape[0] // given.shape[0])).double()
    real = keys < rows
    return torch.zeros(rows, given.shape[1], dtype=torch.float64).index_add(0, keys[real].long(), twice[real])


def check_sums() -> None:
    """Keys that fill chunks, cross one border and many, end at a border; no key at all; odd widths; the same bits twice."""
    torch.manual_seed(0)
    cases = {
        "one token": torch.tensor([3]),
        "one key": torch.full((64,), 4),
        "padding alone": torch.full((40,), 9),
        "up to borders": torch.arange(9).repeat_interleave(torch.tensor([8, 8, 16, 1, 7, 24, 3, 5, 8])),
        "over borders": torch.arange(10).repeat_interleave(torch.tensor([5, 6, 150, 1, 1, 20, 17, 0, 3, 12])),
        "drawn": torch.randint(10, (90,)),
    }
    for name, keys in cases.items():
        mixed = keys[torch.randperm(len(keys))].to(torch.int16)
        given = torch.randn(len(keys), 300 if name == "drawn" else 5)
        found = embedding_kernels.sum_by_key(given, mixed, 9)
        say(f"sum of {name}", apart(found, by_hand(given, mixed, 9)), 2e-5)
    again = embedding_kernels.sum_by_key(given, mixed.int(), 9)
    say("sum with keys of 32 bits", float(not torch.equal(found, again)), 0)
    embedding_kernels._FEW_KEYS = 0
    keys = torch.randint(40, (240,), dtype=torch.int32).clamp_min_(7)
    given = torch.randn(120, 6)
    say("sum of two keys a token", apart(embedding_kernels.sum_by_key(given, keys, 39), by_hand(given, keys, 39)), 2e-5)
    embedding_kernels._FEW_KEYS = 8192


def block(kinds: int, cut: bool, dtype: torch.dtype, drop: float = 0.0) -> tuple[list[Any], _Told]:
    """(tables, gamma and beta; the rest): repeated ids, padding among them, positions that repeat at the filling."""
    torch.manual_seed(1)
    count = 41
    ids = torch.randint(0, 40 if cut else WORDS, (count,), dtype=torch.int32)
    ids[::3] = 5
    ids[-9:] = 0
    rows_of = torch.randint(0, WORDS, (40,), dtype=torch.int32) if cut else None
    if rows_of is not None:
        rows_of[0] = 2
    positions = torch.cat([torch.arange(n) for n in (12, 1, 19)] + [torch.zeros(9, dtype=torch.int64)]).int()
    types = torch.randint(0, kinds, (count,), dtype=torch.int32) if kinds == 2 else None
    tables = [torch.randn(n, WIDTH, requires_grad=True) if n else None for n in (WORDS, PLACES, kinds)]
    norm = [torch.randn(WIDTH, requires_grad=True) for _ in range(2)]
    paddings = (2 if cut else 0, 1)
    return [*tables, *norm], _Told(
        (ids, positions, types), rows_of, paddings, 1e-12, drop, SEEDS, 2, dtype, dtype != torch.float32
    )


def plainly(word: Any, place: Any, kind: Any, gamma: Any, beta: Any, told: _Told) -> torch.Tensor:
    """The block in plain torch, without dropout."""
    ids, positions, types = told.tokens
    rows = ids if told.rows_of is None else told.rows_of[ids.long()]
    total = functional.embedding(rows, word, told.paddings[0])
    if kind is not None:
        total = total + functional.embedding(torch.zeros_like(ids) if types is None else types, kind)
    total = total + functional.embedding(positions, place, told.paddings[1])
    return functional.layer_norm(total, (total.shape[1],), gamma, beta, told.eps)


def check_block(kinds: int, cut: bool) -> None:
    """Against torch's own modules, values and gradients; in half precision what is kept is rounded."""
    for dtype in (torch.float32, torch.bfloat16):
        given, told = block(kinds, cut, dtype)
        name, half = f"embeddings {dtype} kinds={kinds} cut={cut}", dtype != torch.float32
        expected, made = plainly(*given, told), _Embedded.apply(*given, told)
        out, copy = made if half else (made, None)
        say(f"{name} forward", apart(out, expected), 1e-5)
        weight = torch.randn_like(expected)
        leaves = [leaf for leaf in given if leaf is not None]
        if copy is None:
            found = torch.autograd.grad(out, leaves, weight)
        else:
            say(f"{name} copy", apart(copy, expected), 0.05)
            more = torch.randn_like(expected).to(dtype)
            found = torch.autograd.grad((out, copy), leaves, (weight, more))
            weight = weight + more.float()
        wanted = torch.autograd.grad(expected, leaves, weight)
        far = [apart(a, b) / float(b.abs().max()) for a, b in zip(found, wanted, strict=True)]
        say(f"{name} gradients", max(far), 0.01 if half else 1e-5)
        rows = [float(table[padding].abs().max()) for table, padding in zip(found, told.paddings, strict=False)]
        say(f"{name} gradient of padding", max(rows), 0)


def check_block_again() -> None:
    """Frozen tables; the copy or the residual alone is read; a gradient has the same bits again; rows outside a table."""
    given, told = block(2, True, torch.bfloat16, 0.2)
    given[1].requires_grad_(False)
    leaves = [leaf for leaf in given if leaf.requires_grad]
    outs = [_Embedded.apply(*given, told) for _ in range(2)]
    weight = torch.randn_like(outs[0][0])
    one, other = (torch.autograd.grad(out[0], leaves, weight) for out in outs)
    say("embeddings again", float(not all(map(torch.equal, one, other))), 0)
    rounded = weight.bfloat16()
    third = torch.autograd.grad(_Embedded.apply(*given, told)[1], leaves, rounded)
    say("embeddings of which the copy is read", max(map(apart, one, third)), 0.2)
    told.tokens[0][4], told.tokens[1][6], told.tokens[2][8] = 1000, PLACES, 2  # type: ignore[index]
    lost = _Embedded.apply(*given, told)[0].isnan().any(1).nonzero().flatten().tolist()
    say("embeddings outside a table", float(lost != [4, 6, 8]), 0)


def check_block_dropout() -> None:
    """Gradients against small changes of each table; the share kept; what is dropped is none of the norm's input."""
    given, told = block(2, False, torch.float32, 0.3)
    out = _Embedded.apply(*given, told)
    plain, kept = plainly(*given, told), out != 0
    say("embeddings dropout", apart(out, torch.where(kept, plain / 0.7, 0.0)), 1e-5)
    error = (0.21 / out.numel()) ** 0.5
    say("embeddings share kept in standard errors", abs(float(kept.float().mean()) - 0.7) / error, 4)
    weight = torch.randn_like(out)
    wanted = torch.autograd.grad(torch.where(kept, plain / 0.7, 0.0), given, weight)
    far = [apart(a, b) for a, b in zip(torch.autograd.grad(out, given, weight), wanted, strict=True)]
    say("embeddings dropout gradients", max(far), 1e-4)


def check_model(kind: str, cut: bool) -> None:
    """A packed model with fused layers by the kernels of its block, against the model as transformers wrote it, padded."""
    model = make_model(kind)
    rows, labels = make_rows(RAGGED, pad=PAD.get(kind, 0)), make_labels(len(RAGGED))
    loss, _, plain = gradients(model, pad_rows(rows, kind=kind), labels)
    if cut:
        cutting = VocabularyCut.apply(model, np.unique(np.concatenate([*rows["input_ids"], [0]])))
    strategy = enable_padding_free(model)
    fused = fused_layers.FusedLayers(model, torch.float32, first_token_only=True)
    batch = pack(rows, first_position=strategy.first_position, keys=strategy.keys, total=64, longest=32, fillers=2)
    ours_loss, _, ours = gradients(model, batch, labels)
    if cut:
        name = next(n for n, p in model.named_parameters() if p is cutting.parameter)
        ours[name] = cutting.expand(ours[name])
    say(f"{kind} with its embeddings, loss", abs(loss - ours_loss), 1e-6)
    say(f"{kind} with its embeddings, gradients", largest_difference(plain, ours), 1e-5)
    fused.disable()


def check_all() -> None:
    """Every check of this file."""
    check_sums()
    for kinds, cut in ((2, False), (1, True), (0, False)):
        check_block(kinds, cut)
    check_block_again()
    check_block_dropout()
    fused_embeddings.runs_kernels = lambda ids: True
    applied: list[int] = []
    own = _Embedded.apply
    _Embedded.apply = lambda *given: applied.append(1) or own(*given)  # type: ignore[func-returns-value]
    for kind in ("bert", "roberta", "electra", "distilbert"):
        check_model(kind, cut=kind == "bert")
    say("models whose embeddings were not fused", 4 - len(applied), 0)
    _Embedded.apply = own  # type: ignore[method-assign]
