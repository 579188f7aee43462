"""This library's Trainer beside transformers.Trainer on one GPU, family by family: random weights, MRPC's token ids.

    .venv/bin/python bench/token_ids.py                              # once, on a machine with ../shared
    python bench/families_gpu.py [--shapes ...] [--batch 8 64] [--rounds 2] [--seconds 150] [--output FILE.json]

One process; the contestants take turns. Of each turn some steps are left out (ours: captures are made in them), the others are
timed; the median over the rounds is printed. A line after each batch size, so that a machine that goes back in the middle has
shown what was measured until then. Where steps are not captured, ours is measured in float32 too; `--skip` says how many steps of
ours are left out. Steps that no speed-up takes are measured by bench/parity_gpu.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from records import read_commit
from token_files import arrow_rows, collator, engine_rows

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
DEBERTA = {
    "vocab_size": 128100, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "max_relative_positions": -1, "position_biased_input": False,
    "type_vocab_size": 0, "pooler_dropout": 0, "pooler_hidden_act": "gelu", "max_position_embeddings": 512,
}  # fmt: skip
BART = {
    "vocab_size": 30522, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "pad_token_id": 0, "bos_token_id": 101,
    "eos_token_id": 102, "decoder_start_token_id": 102,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("bert", {}),
    "deberta-v3-base": ("deberta-v2", BASE | DEBERTA | {"layer_norm_eps": 1e-7}),
    "modernbert-base": ("modernbert", {"classifier_pooling": "mean"}),
    "mpnet-base": ("mpnet", BASE | {"vocab_size": 30527}),
    "minilm-l6": ("bert", {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "ernie-base": ("ernie", BASE | {"vocab_size": 30522}),
    "roformer-base": ("roformer", BASE | {"vocab_size": 50000, "embedding_size": 768}),
    "nystromformer-base": ("nystromformer", BASE | {"vocab_size": 30522}),
    "big-bird-base": ("big_bird", BASE | {"vocab_size": 30522}),
    "convbert-base": ("convbert", {}),
    "squeezebert": ("squeezebert", {}),
    "funnel": ("funnel", {}),
    "xlnet-base": (
        "xlnet",
        {"vocab_size": 30522, "n_layer": 12, "d_model": 768, "n_head": 12, "d_inner": 3072, "pad_token_id": 0},
    ),
    "bart-base": ("bart", BART),
    "deberta-v1-base": (
        "deberta",
        BASE | {"vocab_size": 30522, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0},
    ),
    "xlm-base": ("xlm", {"vocab_size": 30522, "emb_dim": 768, "n_layers": 12, "n_heads": 12, "pad_index": 0}),
}
"""From ernie-base on they are known to no speed-up but the general one."""
CONTESTANTS = {"ours": ("ours", True), "trainer_bf16": ("theirs", True), "trainer_fp32": ("theirs", False)}


def make_model(shape: str) -> Any:
    """Random weights on the GPU."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    kind, sizes = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, num_labels=2, **sizes))


def make_kind(kind: str) -> Any:
    """The class of a contestant."""
    import transformers

    from tunesmith import Trainer

    class Plain(Trainer):
        use_speed_ups = False

    return {"theirs": transformers.Trainer, "ours": Trainer, "plain": Plain}[kind]


def turn(
    kind: str, half: bool, model: Any, rows: Any, batch: int, steps: int, variant: str = "default", skip: int = 48
) -> dict[str, Any]:
    """Trains some steps, of which the first are not timed. A variant is an optimizer's name, or "hooked": a hook of a user's."""
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments

    steps = 4 * steps if kind == "ours" and skip >= 48 else steps  # captured ones are short
    skip = skip if kind == "ours" else 4

    class Clock(TrainerCallback):  # type: ignore[misc]
        seconds = began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (skip, skip + steps):
                torch.cuda.synchronize()
                self.began, self.seconds = time.perf_counter(), time.perf_counter() - self.began

    clock, said = Clock(), {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=skip + steps, per_device_train_batch_size=batch, bf16=half, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_steps=10**6, **_optimizer(variant),
        )  # fmt: skip
        if variant == "hooked":
            model.base_model.register_forward_hook(lambda module, given, found: None)
        trainer = make_kind(kind)(model, arguments, train_dataset=rows, data_collator=collator(), callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        make = getattr(trainer, "_make_engine", None)

        def noting() -> Any:
            engine = make()
            chosen = engine.speedups
            said.update(
                engine=engine, on=[] if chosen is None else [*chosen.on], notes=[] if chosen is None else chosen.notes
            )
            return engine

        if make is not None:
            trainer._make_engine = noting
        trainer.train()
    engine = said.pop("engine", None)
    graphs = None if engine is None else engine.graphs
    if graphs is not None:
        said |= {"captures": graphs._captures, "given_up": graphs.off, "taken_off": sorted(engine.speedups.dropped)}
    return {"ms": 1e3 * clock.seconds / steps, **said}


def _optimizer(variant: str) -> dict[str, str]:
    return {} if variant in ("default", "hooked") else {"optim": variant}


def contest(shape: str, batch: int, rounds: int, steps: int, rows: Any, variant: str, skip: int) -> dict[str, Any]:
    """All contestants at one batch size."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name, (kind, half) in CONTESTANTS.items():
            # A fresh model for each: under transformers.Trainer accelerate puts another forward on it, which stays.
            turns[name].append(turn(kind, half, make_model(shape), rows, batch, steps, variant, skip))
    said = {k: v for k, v in turns["ours"][-1].items() if k != "ms"}
    if (
        said.get("given_up") or "captures" not in said
    ):  # uncaptured, the faster precision may be another one for us as well
        turns["ours_fp32"] = [
            turn("ours", False, make_model(shape), rows, batch, steps, variant, skip) for _ in range(rounds)
        ]
    found = {name: statistics.median(t["ms"] for t in some) for name, some in turns.items()}
    peer, best = (min(ms for name, ms in found.items() if name.startswith(who)) for who in ("trainer", "ours"))
    print(
        f"{shape:<20} {variant:<10} {batch:>4}  "
        + "  ".join(f"{name} {ms:7.2f}" for name, ms in found.items())
        + f"  | {peer / best:5.2f}x of the faster",
        flush=True,
    )
    print(f"    {json.dumps(said, default=str)}", flush=True)
    return {"ms": found, "ratio": peer / best, "path": said}


def main() -> None:
    """Prints two lines for each shape and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--variants", nargs="+", default=["default"], help="default, hooked, or names for --optim")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--skip", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=1e9, help="no further shape is begun after so many")
    parser.add_argument("--output")
    parser.add_argument("--commit", default=read_commit())
    args = parser.parse_args()
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.set_verbosity_error()
    began, rows = time.perf_counter(), arrow_rows(engine_rows("mrpc", "train"))
    about = {
        "torch": torch.__version__, "transformers": transformers.__version__, "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"), "commit": args.commit, "command": f"bench/families_gpu.py {' '.join(sys.argv[1:])}",
    }  # fmt: skip
    print(about, flush=True)
    results, failed = dict[str, Any](), dict[str, str]()
    for shape in args.shapes:
        if time.perf_counter() - began > args.seconds:
            print(f"{shape}: left out, {args.seconds:.0f} s are over", flush=True)
            continue
        for batch, variant in product(args.batch, args.variants):
            try:
                found = contest(shape, batch, args.rounds, args.steps, rows, variant, args.skip)
                name = shape if variant == "default" else f"{shape}, {variant}"
                results.setdefault(name, {})[str(batch)] = found
            except Exception as error:  # the others are measured all the same
                failed[shape] = f"{type(error).__name__}: {error}"
                print(f"{shape} {batch}: {failed[shape]}", flush=True)
            if args.output:
                Path(args.output).write_text(
                    json.dumps(about | {"shapes": results, "failed": failed}, indent=1, default=str)
                )


if __name__ == "__main__":
    main()
