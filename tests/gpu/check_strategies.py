"""The exact strategies on a GPU: run by hand there, `python tests/gpu/check_strategies.py [--ids ids.npz] [--quick]`.

Needs torch, transformers and numpy only. BERT-base shape with random weights; token ids from an .npz file with `ids`
(all rows end to end) and `lengths`, else random ones. Prints a line a check and ends with 1 if one failed:
float32 loss and gradients against the padded step (1e-5), bf16 against the float32 step (no worse than twice padded bf16),
dropout's mean loss, a captured graph replayed on other rows, step times.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from tunesmith.model.cls_only import enable_first_token_only
from tunesmith.model.packing import Layout, pack
from tunesmith.model.padding_free import PaddingFree, enable_padding_free
from tunesmith.model.vocabulary import VocabularyCut

Rows = dict[str, list[np.ndarray]]
DEVICE = torch.device("cuda")
failures: list[str] = []


def check(name: str, found: float, limit: float) -> None:
    """One printed line; notes a failure."""
    good = found <= limit
    print(f"{'ok  ' if good else 'FAIL'} {name}: {found:.3g} (limit {limit:.3g})", flush=True)
    if not good:
        failures.append(name)


def make_model(*, dropout: float, layers: int, seed: int = 0) -> nn.Module:
    """BERT-base with random weights, in train mode."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
    )
    return BertForSequenceClassification(config).to(DEVICE).train()


def read_ids(file: str | None) -> list[np.ndarray]:
    """Rows of token ids."""
    if file is None:
        rng = np.random.default_rng(0)
        return [rng.integers(1000, 12000, n) for n in np.clip(rng.normal(53, 13, 2000), 1, 103).astype(int)]
    data = np.load(file)
    return np.split(data["ids"].astype(np.int64), np.cumsum(data["lengths"])[:-1])


def take(ids: list[np.ndarray], at: int, batch: int) -> Rows:
    """A batch of rows with segments."""
    some = ids[at : at + batch]
    return {"input_ids": some, "token_type_ids": [(np.arange(len(x)) > len(x) // 2).astype(np.int64) for x in some]}


def padded(rows: Rows) -> dict[str, torch.Tensor]:
    """What a plain collator makes."""
    longest = max(len(x) for x in rows["input_ids"])
    mask = [np.ones(len(x), np.int64) for x in rows["input_ids"]]
    return {
        k: torch.from_numpy(np.stack([np.pad(x, (0, longest - len(x))) for x in v])).to(DEVICE)
        for k, v in {**rows, "attention_mask": mask}.items()
    }


def packed(rows: Rows, strategy: PaddingFree, **options: Any) -> dict[str, Any]:
    """The packed batch on the device."""
    batch = pack(rows, first_position=strategy.first_position, keys=strategy.keys, **options)
    return {k: v.to(DEVICE) for k, v in batch.items()}


def run(
    model: nn.Module, batch: dict[str, Any], labels: torch.Tensor, dtype: torch.dtype
) -> tuple[float, torch.Tensor]:
    """Loss, and all gradients as one vector."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        loss = model(**batch, labels=labels).loss
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check_equal(ids: list[np.ndarray], layers: int) -> None:
    """Packed and cut against padded."""
    plain = make_model(dropout=0.0, layers=layers)
    for batch in (1, 8, 32):
        rows, labels = take(ids, 0, batch), torch.arange(batch, device=DEVICE) % 2
        loss, grad = run(plain, padded(rows), labels, torch.float32)
        bf16_loss, bf16_grad = run(plain, padded(rows), labels, torch.bfloat16)
        for cut in (False, True):
            ours = copy.deepcopy(plain)
            strategy = enable_padding_free(ours)
            if cut:
                enable_first_token_only(ours)
            total = -(-sum(map(len, rows["input_ids"])) // 64) * 64 + 64
            for options in ({}, {"total": total, "longest": 128}):
                name = f"batch {batch}, cut={cut}, filled={bool(options)}"
                one, found = run(ours, packed(rows, strategy, **options), labels, torch.float32)
                check(f"float32 loss, {name}", abs(one - loss), 1e-5)
                check(f"float32 gradients, {name}", float((found - grad).abs().max()), 1e-5)
                one, found = run(ours, packed(rows, strategy, **options), labels, torch.bfloat16)
                check(f"bf16 loss, {name}", abs(one - loss), 2 * abs(bf16_loss - loss) + 2e-3)
                norm, bf16_norm = ((g - grad).norm() / grad.norm() for g in (found, bf16_grad))
                check(f"bf16 gradients, relative, {name}", float(norm), 2 * float(bf16_norm))


def check_dropout(ids: list[np.ndarray], layers: int) -> None:
    """Mean loss with dropout over many draws, padded against packed, in standard errors."""
    rows, labels = take(ids, 64, 16), torch.arange(16, device=DEVICE) % 2
    model = make_model(dropout=0.2, layers=layers)
    for dtype in (torch.float32, torch.bfloat16):
        ours = copy.deepcopy(model)
        strategy = enable_padding_free(ours)
        enable_first_token_only(ours)
        draws = []
        for one, batch in ((model, padded(rows)), (ours, packed(rows, strategy))):
            with torch.no_grad(), torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                draws.append(torch.stack([one(**batch, labels=labels).loss for _ in range(300)]).double())
        error = float((draws[0].var() / 300 + draws[1].var() / 300).sqrt())
        check(
            f"{dtype} dropout, mean loss in standard errors", abs(float(draws[0].mean() - draws[1].mean())) / error, 4
        )
        check(f"{dtype} dropout, spread ratio", abs(float((draws[0].std() / draws[1].std()).log())), 0.3)


def copy_into(static: dict[str, Any], fresh: dict[str, Any]) -> None:
    """A new batch in the captured one's memory."""
    for name, value in fresh.items():
        if isinstance(value, Layout):
            for part in ("bounds", "starts", "order"):
                getattr(static[name], part).copy_(getattr(value, part))
        else:
            static[name].copy_(value)


def check_graph(ids: list[np.ndarray], layers: int, dtype: torch.dtype) -> None:
    """Forward and backward captured on one batch and replayed on others: fixed shapes, no sync inside."""
    model = make_model(dropout=0.0, layers=layers)
    ours = copy.deepcopy(model)
    strategy = enable_padding_free(ours)
    enable_first_token_only(ours)
    labels = torch.arange(8, device=DEVICE) % 2
    options = {"total": 768, "longest": 512}
    static = packed(take(ids, 0, 8), strategy, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run_captured(ours, static, labels, dtype)
    torch.cuda.current_stream().wait_stream(stream)
    ours.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run_captured(ours, static, labels, dtype)
    for at in (0, 8, 80):
        rows = take(ids, at, 8)
        copy_into(static, packed(rows, strategy, **options))
        graph.replay()
        expected, grad = run(model, padded(rows), labels, torch.float32)
        found = torch.cat([p.grad.flatten() for p in ours.parameters()])
        exact = dtype == torch.float32
        check(f"graph {dtype}, rows from {at}, loss", abs(float(loss) - expected), 1e-5 if exact else 2e-2)
        check(
            f"graph {dtype}, rows from {at}, gradients",
            float((found - grad).norm() / grad.norm()),
            1e-4 if exact else 0.1,
        )


def run_captured(model: nn.Module, batch: dict[str, Any], labels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Forward and backward without a host read; gradients are made anew."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False):
        loss: torch.Tensor = model(**batch, labels=labels).loss
    loss.backward()
    return loss.detach()


def check_vocabulary(ids: list[np.ndarray]) -> None:
    """Cut vocabulary on the device against full AdamW, 20 steps."""
    plain = make_model(dropout=0.0, layers=2)
    ours = copy.deepcopy(plain)
    cut = VocabularyCut.apply(ours, np.concatenate(ids[:200]))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=5e-5, weight_decay=0.1, fused=True) for m in (plain, ours)]
    labels = torch.arange(8, device=DEVICE) % 2
    for step in range(20):
        rows = take(ids, 8 * step, 8)
        small = {**rows, "input_ids": [cut.remap(x) for x in rows["input_ids"]]}
        for model, optimizer, some in zip((plain, ours), optimizers, (rows, small), strict=True):
            optimizer.zero_grad()
            model(**padded(some), labels=labels).loss.backward()
            optimizer.step()
        cut.decay(1 - 5e-5 * 0.1)
    cut.restore()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    check("cut vocabulary, weights after 20 steps", max(float((a - b).detach().abs().max()) for a, b in pairs), 1e-4)


def time_step(step: Callable[[], Any]) -> float:
    """Milliseconds, median of 20."""
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[5:]) * 1e3)


def report_times(ids: list[np.ndarray], layers: int) -> None:
    """Eager forward and backward, padded against packed, bf16 with dropout."""
    for batch in (8, 64, 256):
        rows, labels = take(ids, 0, batch), torch.arange(batch, device=DEVICE) % 2
        plain = make_model(dropout=0.1, layers=layers)
        ours = copy.deepcopy(plain)
        strategy = enable_padding_free(ours)
        enable_first_token_only(ours)
        a, b = padded(rows), packed(rows, strategy)
        before = time_step(lambda m=plain, x=a, y=labels: run_captured(m, x, y, torch.bfloat16))
        after = time_step(lambda m=ours, x=b, y=labels: run_captured(m, x, y, torch.bfloat16))
        print(
            f"     batch {batch}: padded {before:.2f} ms, packed and cut {after:.2f} ms, {before / after:.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids")
    parser.add_argument("--quick", action="store_true", help="2 layers instead of 12")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this check needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    layers = 2 if asked.quick else 12
    ids = read_ids(asked.ids)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {len(ids)} rows")
    check_equal(ids, layers)
    check_dropout(ids, 2)
    for dtype in (torch.float32, torch.bfloat16):
        check_graph(ids, layers, dtype)
    check_vocabulary(ids)
    report_times(ids, layers)
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {', '.join(failures)}")
    print("all checks passed")


if __name__ == "__main__":
    main()
