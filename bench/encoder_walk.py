"""Every model type that transformers registers for sequence classification, tiny and with random weights: which path it takes.

    .venv/bin/python bench/encoder_walk.py [--types bert roformer ...] [--output docs/research/performance/encoder_walk.json]
    python bench/encoder_walk.py --cuda --jobs 12 --output $OUT/encoder_walk_h200.json      # on a machine with a GPU

For each type: whether rows are packed without padding and why not; whether a GPU may try to capture its padded steps, by what a
step does on the host (reads of values and random numbers end a capture; copying a constant does not); and how far loss and
gradients of the fast step are from those of the plain one: digits of agreement, of the largest difference of a gradient over the
norm of all.
`buckets` compares batches padded to a multiple of 16 with batches padded to their longest row.

With `--cuda` each type trains there: eight float32 steps with all speed-ups and eight without, on the same rows. Was the step
captured, if not why, how far apart are the losses, and how long does a step take either way (processes share the GPU: a ratio
of a type means little, the median over all types more).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SIZES: dict[int, tuple[str, ...]] = {
    128: ("vocab_size", "entity_vocab_size", "num_hash_buckets"),
    32: ("hidden_size", "d_model", "dim", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim", "entity_emb_size"),
    2: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
        "num_decoder_layers", "type_vocab_size",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads",
        "num_key_value_heads", "num_local_experts", "num_experts",
    ),
    8: ("head_dim", "d_kv", "d_head", "d_embed"),
    64: (
        "intermediate_size", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "ffn_dim", "n_inner",
        "max_position_embeddings", "n_positions", "moe_intermediate_size", "shared_expert_intermediate_size",
    ),
    16: ("q_lora_rank", "kv_lora_rank", "mamba_d_state", "image_size"),
}  # fmt: skip
LATENT = {  # keys and values from a small vector; positions turn the first 8 of each head alone
    "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8} | {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "num_experts_per_tok": 2,
}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
OWN: dict[str, dict[str, Any]] = {
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "big_bird": {"attention_type": "original_full"},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "canine": {"num_hash_buckets": 64},
    "reformer": {
        "axial_pos_embds": False, "is_decoder": False, "attn_layers": ["local", "lsh"], "num_buckets": 2,
        "local_attn_chunk_length": 64, "lsh_attn_chunk_length": 64,
    },
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "perceiver": {
        "d_latents": 32, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
    },
    "t5": {"decoder_start_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "qwen3_moe": {"num_experts_per_tok": 2},
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3"), LATENT),
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "mistral4": LATENT | {"head_dim": 16},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), MIXED),
    "qwen3_5": {"text_config": MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
}  # fmt: skip
LENGTHS = (5, 19, 33, 12)
STEPS = 8
OFF = dict.fromkeys(("pack_rows", "first_token_only", "restrict_vocabulary", "fused_layers", "cuda_graphs"), "off")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero")
MOST = 30_000_000


class HostReads(TorchDispatchMode):
    """Notes operators that hand a value of a tensor to the host: on a GPU they wait, and end a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masked = name == "aten.index.Tensor" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if any(word in name for word in READS) or masked:
            self.found.append("aten.index with a mask" if masked else name)
        return func(*args, **(kwargs or {}))


def shrunk(stored: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Small sizes for what a config holds, and for the configs inside it."""
    given = {
        name: size
        for size, names in SIZES.items()
        for name in names
        if name in stored and (stored[name] is None or isinstance(stored[name], int))
    }
    given |= {name: value for name, value in IDS.items() if name in stored} | own
    given |= {n: 0.0 for n, v in stored.items() if "drop" in n and isinstance(v, float)}
    inner = {n: v for n, v in stored.items() if isinstance(v, dict) and "model_type" in v}
    return given | {n: {"model_type": v["model_type"], **shrunk(v, own.get(n, {}))} for n, v in inner.items()}


def tiny(kind: str) -> Any:
    """A small model of a type, or the reason why none was made."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    given = shrunk(AutoConfig.for_model(kind).to_dict(), OWN.get(kind, {}))
    made = AutoConfig.for_model(kind, num_labels=2, **given)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForSequenceClassification.from_config(made).parameters())
    if size > MOST:
        raise ValueError(f"{size / 1e6:.0f} M parameters with these sizes")
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(made)


def make_state(model: Any, wish: str) -> tuple[Any, Any, Any]:
    """(engine state, a batch of four rows, its speedups); `wish` for packing."""
    from tunesmith.data.batches import Padding, make_batch
    from tunesmith.data.tokens import TokenRows
    from tunesmith.labels import LabelMap
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.evaluation import TaskLoss
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.state import TrainState

    rng = np.random.default_rng(0)
    ids = [np.concatenate([rng.integers(5, 100, n - 1), [2]]) for n in LENGTHS]
    rows = TokenRows.from_lists({"input_ids": ids, "labels": [0, 1, 1, 0]})
    runtime = make_runtime(use_cpu=True)
    chosen = apply_speedups(model, rows, Padding(), device=runtime.device, pack_rows=wish)  # type: ignore[arg-type]
    task = LabelMap.for_classes(["0", "1"]).task
    state = TrainState(
        model, make_optimizer(model, learning_rate=1e-4), TaskLoss(task, 2), runtime, speedups=chosen, only_writer=True
    )
    return state, make_batch(rows, np.arange(len(LENGTHS)), chosen.padding), chosen


def digits(one: Any, other: Any) -> float:
    """How many digits of the gradients agree."""
    apart = max(float((one.of[n] - g).norm()) for n, g in other.of.items())
    share = max(
        apart / max(float(other.norm()), 1e-30), abs(float(one.loss - other.loss)) / max(abs(float(other.loss)), 1e-9)
    )
    return round(min(16.0, -math.log10(max(share, 1e-16))), 1)


def look_at(kind: str) -> dict[str, Any]:
    """One line of the table."""
    from tunesmith.speedups.cuda_graphs import bucketed, no_host_randomness, why_not_captured
    from tunesmith.speedups.packing import collated
    from tunesmith.speedups.verify import measure

    state, batch, chosen = make_state(tiny(kind), "auto")
    packed = "packing" in chosen.on
    with chosen.without(list(chosen.parts)):
        plain = measure(state, batch)
        wide = digits(measure(state, collated(batch, bucketed(chosen.padding, 48))), plain)
    fast = digits(measure(state, collated(batch, chosen.train_collate)), plain)
    line: dict[str, Any] = {
        "type": kind,
        "packed": packed,
        "speed_ups": list(chosen.on),
        "digits": fast,
        "buckets": wide,
    }
    line["why"] = next((n.split(": ", 1)[1] for n in chosen.notes if n.startswith("padding_free")), None)
    chosen.close()
    reads = HostReads()
    state.model.train()
    try:
        # As inside a capture: there transformers does not look whether a mask is all ones.
        with reads, no_host_randomness(), mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            loss, _ = state.objective.sum(state.model, batch)
            loss.backward()
        reason = why_not_captured(state.model)
    except RuntimeError as error:
        reason = str(error)
    if reason is None and reads.found:
        reason = f"reads a value ({', '.join(sorted(set(reads.found)))})"
    line["gpu"] = "packed, captured" if packed else "padded, capture tried" if reason is None else "as transformers"
    line["gpu_why"] = None if packed else reason
    return line


class Said(logging.Handler):
    """Keeps what was warned of: why a step was not captured."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def take_steps(kind: str, wishes: dict[str, Any]) -> tuple[list[float], float, Any, list[str]]:
    """(losses, ms of a later step, its captured steps, what was reported) of a few float32 steps on a GPU."""
    from tunesmith.data.batches import Batches, Padding
    from tunesmith.data.tokens import TokenRows
    from tunesmith.events import Note, SafePoint, StepDone
    from tunesmith.labels import Task
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.evaluation import TaskLoss
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.schedule import Plan, Schedule
    from tunesmith.training.state import TrainState

    rng, runtime = np.random.default_rng(0), make_runtime(precision="no")
    ids = [np.concatenate([rng.integers(5, 100, n - 1), [2]]) for n in LENGTHS]
    rows = TokenRows.from_lists({"input_ids": ids, "labels": [0, 1, 1, 0]})
    model = tiny(kind).to(runtime.device)
    chosen = apply_speedups(model, rows, Padding(), device=runtime.device, **wishes)
    optimizer = make_optimizer(model, learning_rate=1e-3)
    objective = TaskLoss(Task.BINARY, 2)
    state = TrainState(model, optimizer, objective, runtime, speedups=chosen, only_writer=True)
    plan = Plan(STEPS, tuple(range(1, STEPS + 1)), Schedule("constant", 1e-3, 0, STEPS), seed=1, read_back_every=1)
    losses, said, times = list[float](), list(chosen.notes), list[float]()
    for event in train_events(state, Batches(rows, chosen.train_collate, len(LENGTHS), seed=1), plan):
        if isinstance(event, StepDone):
            losses.append(math.nan if event.loss is None else event.loss)
        elif isinstance(event, SafePoint):
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        elif isinstance(event, Note):
            said.append(event.text)
    later = [1000 * (b - a) for a, b in pairwise(times[3:])]
    return losses, statistics.median(later), chosen.graphs, said


def train_on_gpu(kind: str) -> dict[str, Any]:
    """One line of the table of `--cuda`."""
    heard = Said()
    logging.getLogger("tunesmith").addHandler(heard)
    fast, ms, graphs, notes = take_steps(kind, {})
    plain, plain_ms, _, _ = take_steps(kind, OFF)
    captured = graphs is not None and len(graphs) > 0 and not graphs.off
    packed = not any(note.startswith("padding_free") for note in notes)
    apart = float(np.abs(np.subtract(fast, plain)).max())
    why = next((n for n in (*heard.lines, *notes) if "captured" in n or n.startswith("cuda_graphs")), None)
    return {
        "type": kind, "captured": captured, "packed": packed, "why": None if captured else why, "apart": apart,
        "digits": round(min(16.0, -math.log10(max(apart / max(abs(plain[0]), 1e-9), 1e-16))), 1) if apart == apart else 0.0,
        "ms": round(ms, 2), "plain_ms": round(plain_ms, 2), "losses": [round(loss, 6) for loss in plain],
    }  # fmt: skip


def one_line(kind: str, cuda: bool) -> tuple[dict[str, Any], str]:
    """What was found about a type, and how it is printed."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    began = time.perf_counter()
    try:
        line = train_on_gpu(kind) if cuda else look_at(kind)
        if cuda:
            text = f"{'captured' if line['captured'] else '-':<9} {'packed' if line['packed'] else '-':<7}"
            text += f"digits {line['digits']:>4}  {line['ms']:>7} ms, plain {line['plain_ms']:>7}  {line['why'] or ''}"
        else:
            why = line["gpu_why"] or line["why"] or ""
            text = f"{line['gpu']:<18} digits {line['digits']:>4}  buckets {line['buckets']:>4}  {why}"
    except Exception as error:  # of more than a hundred types, each has its own
        said = str(error).strip().splitlines() or [""]
        line = {"type": kind, "failed": f"{type(error).__name__}: {said[0][:160]}"}
        text = f"not looked at: {line['failed']}"
    return line, f"{kind:<26} {text}  ({time.perf_counter() - began:.1f} s)"


def main() -> None:
    """Prints one line for each type, and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", help="only these; with --output their lines of that file are replaced")
    parser.add_argument("--cuda", action="store_true", help="train each type on a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--output")
    args = parser.parse_args()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    known = json.loads(Path(args.output).read_text())["types"] if args.types and args.output else []
    lines = [line for line in known if line["type"] not in args.types]
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    about |= {"device": torch.cuda.get_device_name()} if args.cuda else {}
    kinds = args.types or sorted(NAMES)
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for line, text in pool.map(one_line, kinds, [args.cuda] * len(kinds)):
            lines = sorted([*lines, line], key=lambda one: str(one["type"]))
            print(text, flush=True)
            if args.output:
                Path(args.output).write_text(json.dumps(about | {"types": lines}, indent=1))
    looked = [line for line in lines if "failed" not in line]
    wrong = [line["type"] for line in looked if line["digits"] < 4]
    print(
        f"{len(looked)} of {len(lines)} types; further than 4 digits from the plain step: {', '.join(wrong) or 'none'}"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
