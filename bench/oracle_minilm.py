"""Do 50 steps on a real model give the losses and weights of transformers.Trainer? MiniLM and MRPC, dropout off, fp32.

    OMP_NUM_THREADS=1 nice python bench/oracle_minilm.py [--steps 50] [--rows 250] [--batch 8]

Needs ../shared/data/mrpc. The rows are chosen so that every epoch ends in a ragged window, with a ragged micro-batch in it.
With accumulation the Trainer is given `compute_loss_func`, its documented way to divide by the whole window.
The exit status is 1 when a loss differs by more than 1e-5 or a weight by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MRPC = Path(__file__).resolve().parents[2] / "shared" / "data" / "mrpc"
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4
RATE, DECAY, WARMUP = 5e-5, 0.01, 5


def load_rows(count: int) -> tuple[Any, Path]:
    """(token rows of the first training pairs, the model folder)."""
    from tunesmith.data.read import load_data
    from tunesmith.data.tokens import TokenRows
    from tunesmith.models.files import find_embedded, load_tokenizer

    folder = find_embedded()
    file = next(iter(sorted(MRPC.glob("*train*"))), None)
    if file is None:
        raise SystemExit(f"needs {MRPC}")
    bundle = load_data(train_file=file, max_train_samples=count, validation_split_fraction=0)
    train = bundle.splits["train"]
    texts = [list(train[name]) for name in bundle.columns.text]
    encoded = load_tokenizer(folder)(*texts, truncation=True, max_length=128)
    return TokenRows.from_lists({**encoded, "labels": list(train["labels"])}), folder


def load_plain(folder: Path) -> Any:
    """The same classifier every time, without dropout."""
    import torch

    from tunesmith.labels import LabelMap
    from tunesmith.models.load import load_model
    from tunesmith.training.state import seed_everything

    seed_everything(42)
    model = load_model(folder, LabelMap.for_classes(("0", "1"))).model
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(model.config, name, 0.0)
    return model


def train_theirs(rows: Any, model: Any, steps: int, batch: int, accumulation: int) -> list[float]:
    """Losses of transformers.Trainer."""
    import torch
    from torch.nn import functional
    from transformers import PrinterCallback, Trainer, TrainingArguments

    def pad(features: list[dict[str, Any]]) -> dict[str, Any]:
        width = max(len(f["input_ids"]) for f in features)
        names = ("input_ids", "token_type_ids", "attention_mask")
        out = {n: torch.tensor([f[n] + [0] * (width - len(f[n])) for f in features]) for n in names}
        return {**out, "labels": torch.tensor([f["labels"] for f in features])}

    def over_window(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    taken = rows.take(np.arange(len(rows)))
    data = [
        {"input_ids": i.tolist(), "token_type_ids": t.tolist(), "attention_mask": [1] * len(i), "labels": int(y)}
        for i, t, y in zip(taken["input_ids"], taken["token_type_ids"], rows.labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=steps,
            logging_steps=1,
            learning_rate=RATE,
            weight_decay=DECAY,
            warmup_steps=WARMUP,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
        )
        loss = None if accumulation == 1 else over_window
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=pad, compute_loss_func=loss)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_ours(rows: Any, model: Any, steps: int, batch: int, accumulation: int, wish: Any) -> list[float]:
    """Losses of our engine, plain ("off") or with every exact strategy ("auto"); the model is whole again afterwards."""
    from tunesmith.data.batches import Batches, Padding
    from tunesmith.events import StepDone
    from tunesmith.labels import Task
    from tunesmith.speedups.strategies import choose_strategies
    from tunesmith.training.evaluate import TaskLoss
    from tunesmith.training.loop import train_events
    from tunesmith.training.optim import make_optimizer
    from tunesmith.training.plan import Plan, Schedule, epoch_ends_for
    from tunesmith.training.runtime import make_runtime
    from tunesmith.training.state import TrainState

    runtime = make_runtime(use_cpu=True)
    strategies = choose_strategies(
        model,
        rows,
        Padding(),
        device=runtime.device,
        pack_rows=wish,
        first_token_only=wish,
        restrict_vocabulary=wish,
    )
    batches = Batches(rows, strategies.train_collate, batch, seed=7, accumulation=accumulation, sampling="sequential")
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=steps, num_epochs=1)
    plan = Plan(steps, ends, Schedule("linear", RATE, WARMUP, steps), seed=7)
    optimizer = make_optimizer(model, learning_rate=RATE, weight_decay=DECAY)
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), runtime, cut=strategies.cut)
    events = list(train_events(state, batches, plan))
    strategies.disable()
    return [e.loss for e in events if isinstance(e, StepDone) and e.loss is not None]


def main() -> int:
    """Prints the table; 1 when a difference is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=250)
    parser.add_argument(
        "--batch", type=int, default=8, help="rows of a step with accumulation 1; a quarter of it with 4"
    )
    args = parser.parse_args()
    rows, folder = load_rows(args.rows)
    good = True
    print(
        f"{args.steps} steps, {len(rows)} rows of MRPC\n\naccumulation  engine      loss difference  weight difference"
    )
    for accumulation in (1, 4):
        batch = max(1, args.batch // accumulation)
        reference = load_plain(folder)
        theirs = train_theirs(rows, reference, args.steps, batch, accumulation)
        for name, wish in (("plain", "off"), ("strategies", "auto")):
            model = load_plain(folder)
            ours = train_ours(rows, model, args.steps, batch, accumulation, wish)
            assert len(ours) == len(theirs) == args.steps, json.dumps([len(ours), len(theirs)])
            loss = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            weight = max(float((a - b).detach().abs().max()) for a, b in pairs)
            good &= loss < LOSS_LIMIT and weight < WEIGHT_LIMIT
            print(f"{accumulation:<12}  {name:<10}  {loss:<15.1e}  {weight:.1e}", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
