"""The run of bench/fault_table.py with transformers.Trainer: same model, rows, steps and save interval."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from conftest import tiny_bert, token_lists
from faults.engine_trial import Counter

DEFAULTS: dict[str, Any] = {"rows": 48, "accumulation": 1, "fault": None, "jit": False, "learning_rate": 1e-3}


def main(options: dict[str, Any]) -> int:
    """Train, or resume from the last checkpoint as documented; return 1 after a Python error."""
    try:
        run_trial({**DEFAULTS, **options})
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def rows_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows like those of a Dataset."""
    lists = token_lists(count, seed=seed)
    return [
        {k: lists[k][i] for k in lists} | {"attention_mask": [1] * len(lists["input_ids"][i])} for i in range(count)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row."""
    width = max(len(r["input_ids"]) for r in rows)
    out = {
        k: torch.tensor([r[k] + [0] * (width - len(r[k])) for r in rows])
        for k in ("input_ids", "token_type_ids", "attention_mask")
    }
    out["labels"] = torch.tensor([r["labels"] for r in rows])
    return out


def run_trial(options: dict[str, Any]) -> None:
    """Train with a Trainer as in its examples."""
    folder = options["folder"]
    model = tiny_bert(dropout=0.1)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4 // options["accumulation"],
        gradient_accumulation_steps=options["accumulation"],
        num_train_epochs=2,
        learning_rate=options["learning_rate"],
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=1,
        seed=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        enable_jit_checkpoint=options["jit"],
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows_of(48, 0)[: options["rows"]],
        eval_dataset=rows_of(20, 9),
        data_collator=collate,
    )
    if options["fault"]:
        name, _, rest = options["fault"].partition(":")
        FAULTS[name](trainer, *rest.split(":"))
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    saves = time_saves(trainer)
    trainer.train(resume_from_checkpoint=True if last else None)
    trainer.save_model(os.path.join(folder, "model"))
    outcome = {"step": trainer.state.global_step, "tensors": digest(trainer)}
    Path(f"{folder}.outcome").write_text(json.dumps({**outcome, "save_seconds": saves}))


def time_saves(trainer: Any) -> list[float]:
    """Return a list that collects the seconds of each save."""
    inner, seconds = trainer._save_checkpoint, []

    def save(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        inner(*args, **kwargs)
        seconds.append(time.perf_counter() - started)

    trainer._save_checkpoint = save
    return seconds


def digest(trainer: Any) -> str:
    """Return the SHA-256 of model and optimizer, and of the log without times."""
    total = hashlib.sha256()
    tensors = {f"model.{n}": t for n, t in trainer.model.state_dict().items()}
    for index, values in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"optimizer.{index}.{k}": v for k, v in values.items() if isinstance(v, torch.Tensor)}
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for entry in trainer.state.log_history:
        kept = {
            k: v for k, v in sorted(entry.items()) if k in ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
        }
        total.update(json.dumps(kept).encode())
    return total.hexdigest()


def alarm_in_save(trainer: Any, n: str, seconds: str) -> None:
    """Kill the process this many seconds into its n-th save."""
    inner = trainer._save_checkpoint
    start = Counter(int(n), lambda: signal.setitimer(signal.ITIMER_REAL, float(seconds)))

    def save(*args: Any, **kwargs: Any) -> Any:
        start()
        return inner(*args, **kwargs)

    trainer._save_checkpoint = save


def signal_at(trainer: Any, point: str, n: str, name: str) -> None:
    """Send this process a signal when it reaches a point of the step for the n-th time."""
    act = Counter(int(n), lambda: os.kill(os.getpid(), getattr(signal, f"SIG{name}")))

    class Send(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if point == "optimizer":
                act()

    trainer.add_callback(Send())
    if point in ("forward", "evaluate"):
        trainer.model.register_forward_pre_hook(lambda m, _: act() if m.training == (point == "forward") else None)
    elif point == "backward":
        trainer.model.classifier.register_full_backward_hook(lambda *_: act())


def nan_gradient(trainer: Any, step: str) -> None:
    """Make the gradient of one weight NaN at this step and later ones."""
    weight = trainer.model.bert.encoder.layer[1].output.dense.weight
    weight.register_hook(
        lambda grad: torch.full_like(grad, float("nan")) if trainer.state.global_step + 1 >= int(step) else grad
    )


FAULTS = {"alarm_in_save": alarm_in_save, "signal": signal_at, "nan_gradient": nan_gradient}
