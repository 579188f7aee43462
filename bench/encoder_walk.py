"""Every model type that transformers registers for sequence classification, tiny and with random weights: which path it takes.

    .venv/bin/python bench/encoder_walk.py [--types bert roformer ...] [--output docs/performance/encoder_walk.json]

For each type: whether rows are packed without padding and why not; whether a GPU may try to capture its padded steps, by what a
step does on the host (reads of values and random numbers end a capture; a tensor copied from the host does, too, which shows on a
GPU alone); and how far loss and gradients of the fast step are from those of the plain one: digits of agreement, of the largest
difference of a gradient over the norm of all.
`buckets` compares batches padded to a multiple of 16 with batches padded to their longest row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
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
    """(engine state, a batch of four rows, its strategies); `wish` for packing."""
    from tunesmith.engine.evaluate import TaskLoss
    from tunesmith.engine.optim import make_optimizer
    from tunesmith.engine.state import TrainState
    from tunesmith.fast.strategies import choose_strategies
    from tunesmith.labels import LabelMap
    from tunesmith.ranks.runtime import make_runtime
    from tunesmith.tokens.batches import Padding, make_batch
    from tunesmith.tokens.token_rows import TokenRows

    rng = np.random.default_rng(0)
    ids = [np.concatenate([rng.integers(5, 100, n - 1), [2]]) for n in LENGTHS]
    rows = TokenRows.from_lists({"input_ids": ids, "labels": [0, 1, 1, 0]})
    runtime = make_runtime(use_cpu=True)
    chosen = choose_strategies(model, rows, Padding(), device=runtime.device, pack_rows=wish)  # type: ignore[arg-type]
    task = LabelMap.for_classes(["0", "1"]).task
    state = TrainState(model, make_optimizer(model, learning_rate=1e-4), TaskLoss(task, 2), runtime, strategies=chosen)
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
    from tunesmith.fast.compared import measure
    from tunesmith.fast.packing import bucketed, collated, no_host_randomness, why_not_captured

    state, batch, chosen = make_state(tiny(kind), "auto")
    packed = "padding-free" in chosen.on
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
    chosen.disable()
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


def main() -> None:
    """Prints one line for each type, and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", help="only these; with --output their lines of that file are replaced")
    parser.add_argument("--output")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    transformers.utils.logging.set_verbosity_error()
    known = json.loads(Path(args.output).read_text())["types"] if args.types and args.output else []
    lines = [line for line in known if line["type"] not in args.types]
    for kind in args.types or sorted(NAMES):
        began = time.perf_counter()
        try:
            line = look_at(kind)
            why = line["gpu_why"] or line["why"] or ""
            text = f"{line['gpu']:<18} digits {line['digits']:>4}  buckets {line['buckets']:>4}  {why}"
        except Exception as error:  # of more than a hundred types, each has its own
            said = str(error).strip().splitlines() or [""]
            line = {"type": kind, "failed": f"{type(error).__name__}: {said[0][:160]}"}
            text = f"not looked at: {line['failed']}"
        lines = sorted([*lines, line], key=lambda one: str(one["type"]))
        print(f"{kind:<26} {text}  ({time.perf_counter() - began:.1f} s)", flush=True)
        if args.output:
            about = {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
            }
            Path(args.output).write_text(json.dumps(about | {"types": lines}, indent=1))
    looked = [line for line in lines if "failed" not in line]
    wrong = [line["type"] for line in looked if line["digits"] < 4]
    print(
        f"{len(looked)} of {len(lines)} types; further than 4 digits from the plain step: {', '.join(wrong) or 'none'}"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
