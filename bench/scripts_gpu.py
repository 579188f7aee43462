"""Time per training step of customized scripts on a GPU: tunesmith's Trainer compared with transformers', in one process.

    .venv/bin/python bench/common.py                              # once, on a machine with ../shared
    python bench/scripts_gpu.py [--scripts ...] [--batch 16 64] [--rounds 3] [--output FILE.json]
    python bench/scripts_gpu.py --tiny                            # a small model on a CPU: do all scripts run?

Each row is a script with one common change. All use BERT-base with random weights, MRPC token ids, dropout on, bf16. The
Trainers take turns, each with a new model. The time of a step is the median over blocks of ten steps after the first ones, so
that steps in which CUDA graphs are captured don't count. Prints and writes the median over the rounds, the peak of torch's
allocator, and the line with which tunesmith reports its speedups. A script that fails is listed with its error. LoRA needs peft.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from torch import nn
from torch.nn import functional

import tunesmith
from common import collator, describe_run, engine_rows, pad, trainer_rows

Rows = list[dict[str, Any]]
KINDS = {"transformers": (10, 40), "tunesmith": (40, 60)}
"""Library -> steps that are not counted, and steps that are."""
BLOCK = 10


# --- parts of the scripts ---------------------------------------------------------------------------------------------


def classifier(config: Any) -> Any:
    """Return BERT with transformers' head."""
    return transformers.BertForSequenceClassification(config)


def half_frozen(config: Any) -> Any:
    """Return a classifier whose embeddings and lower layers are not trained."""
    model = classifier(config)
    lower = (model.bert.embeddings, *model.bert.encoder.layer[: config.num_hidden_layers // 2])
    for part in lower:
        part.requires_grad_(False)
    return model


def with_lora(config: Any) -> Any:
    """Return a classifier with LoRA adapters."""
    from peft import LoraConfig, TaskType, get_peft_model

    return get_peft_model(classifier(config), LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query", "value"]))


def tagger(config: Any) -> Any:
    """Return BERT for token classification."""
    return transformers.BertForTokenClassification(config)


class Pooled(nn.Module):
    """A custom model: an encoder, mean pooling, and a linear layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.encoder, self.head = transformers.BertModel(config), nn.Linear(config.hidden_size, 2)

    def embed(self, input_ids: Any, attention_mask: Any) -> Any:
        """Return one vector per example."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None, labels: Any = None) -> Any:
        """Return loss and logits."""
        logits = self.head(self.embed(input_ids, attention_mask))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Siamese(Pooled):
    """Two texts through one encoder, with in-batch negatives."""

    def forward(
        self, input_ids: Any, attention_mask: Any, other_ids: Any = None, other_mask: Any = None, labels: Any = None
    ) -> Any:
        """Return loss and similarities."""
        first, second = self.embed(input_ids, attention_mask), self.embed(other_ids, other_mask)
        scores = 20 * functional.normalize(first) @ functional.normalize(second).T
        return {
            "loss": functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device)),
            "logits": scores,
        }


def weighted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a class-weighted loss."""
    return functional.cross_entropy(outputs["logits"], labels, weight=outputs["logits"].new_tensor([2.0, 1.0]))


class Weighted:
    """A class-weighted loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the loss."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return (weighted(outputs, labels), outputs) if return_outputs else weighted(outputs, labels)


class RDrop:
    """Two calls with different dropout, whose predictions should agree."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the loss."""
        one, two = model(**inputs), model(**inputs)
        logs = [functional.log_softmax(out.logits.float(), -1) for out in (one, two)]
        agree = functional.kl_div(*logs, log_target=True, reduction="batchmean")
        loss = (one.loss + two.loss) / 2 + agree
        return (loss, one) if return_outputs else loss


class Distilled:
    """A student that learns from a teacher's logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the loss."""
        if not hasattr(self, "teacher"):
            torch.manual_seed(1)
            self.teacher = classifier(self.model.config).to(self.args.device).eval()  # type: ignore[attr-defined]
        outputs = model(**inputs)
        with torch.no_grad():
            target = self.teacher(**inputs).logits.softmax(-1)
        loss = outputs.loss + functional.cross_entropy(outputs.logits.float(), target)
        return (loss, outputs) if return_outputs else loss


class FastGradient:
    """FGM: a second backward pass with embeddings moved against the gradient."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        """Return the loss."""
        loss = super().training_step(model, inputs, *args)  # type: ignore[misc]
        weight = self.model.get_input_embeddings().weight  # type: ignore[attr-defined]
        before = weight.data.clone()
        weight.data.add_(weight.grad / weight.grad.norm().clamp_min(1e-12))
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            second = self.compute_loss(model, self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        self.accelerator.backward(second)  # type: ignore[attr-defined]
        weight.data = before
        return loss


class LayerRates:
    """A lower learning rate for lower layers."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Return AdamW with a group per layer."""
        own = self.model  # type: ignore[attr-defined]
        layers = [own.bert.embeddings, *own.bert.encoder.layer]
        inside = {p for layer in layers for p in layer.parameters()}
        groups = [{"params": [p for p in own.parameters() if p not in inside], "lr": 5e-5}]
        for depth, layer in enumerate(reversed(layers)):
            groups.append({"params": list(layer.parameters()), "lr": 5e-5 * 0.9**depth})
        self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer


class Counting(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that counts steps."""

    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count a step."""
        self.steps += 1


class Listed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A torch dataset of dicts."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: torch.tensor(value) for name, value in self.rows[number].items()}


def pad_tensors(features: Rows) -> dict[str, torch.Tensor]:
    """Pad examples that are tensors."""
    return pad([{n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in row.items()} for row in features])


def pad_pairs(features: Rows) -> dict[str, torch.Tensor]:
    """Pad pairs that consist of an example and the next one."""
    one, other = pad(features), pad([*features[1:], features[0]])
    del one["token_type_ids"]
    return {**one, "other_ids": other["input_ids"], "other_mask": other["attention_mask"]}


def pad_tags(features: Rows) -> dict[str, torch.Tensor]:
    """Pad examples with a label per token."""
    found = pad(features)
    found["labels"] = torch.where(found["attention_mask"] == 1, found["input_ids"] % 2, -100)
    return found


# --- the scripts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """One change to the usual script; a `collate` of None means DataCollatorWithPadding."""

    arguments: dict[str, Any] = field(default_factory=dict)
    model: Callable[[Any], Any] = classifier
    methods: type = object
    data: Callable[[Rows], Any] = Dataset.from_list
    collate: Callable[[Rows], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


SCRIPTS: dict[str, Script] = {
    "unmodified": Script(),
    "adamw_torch": Script({"optim": "adamw_torch"}),
    "lower half frozen": Script(model=half_frozen),
    "fp16": Script({"bf16": False, "fp16": True}),
    "accumulation 2": Script({"gradient_accumulation_steps": 2}),
    "fp32": Script({"bf16": False}),
    "compute_loss override": Script(methods=Weighted),
    "compute_loss_func": Script(options={"compute_loss_func": weighted}),
    "collator function": Script(collate=pad),
    "two workers": Script({"dataloader_num_workers": 2}),
    "custom model class": Script(model=Pooled, collate=pad),
    "torch dataset": Script(data=Listed, collate=pad_tensors),
    "label smoothing": Script({"label_smoothing_factor": 0.1}),
    "adafactor": Script({"optim": "adafactor"}),
    "gradient checkpointing": Script({"gradient_checkpointing": True}),
    "length grouping": Script({"train_sampling_strategy": "group_by_length"}),
    "LoRA": Script(model=with_lora),
    "FGM": Script(methods=FastGradient),
    "R-Drop": Script(methods=RDrop),
    "distillation": Script(methods=Distilled),
    "siamese": Script({"remove_unused_columns": False}, model=Siamese, collate=pad_pairs),
    "evaluation every 50 steps": Script({"eval_strategy": "steps", "eval_steps": 50}),
    "callback": Script(options={"callbacks": [Counting]}),
    "logging every step": Script({"logging_steps": 1}),
    "layer-wise learning rates": Script(methods=LayerRates),
    "token classification": Script(model=tagger, collate=pad_tags),
    "shuffled dataset": Script(data=lambda rows: Dataset.from_list(rows).shuffle(seed=1)),
}


def make_trainer(name: str, base: Any, folder: str | Path, config: Any, rows: Rows, padding: Any, **given: Any) -> Any:
    """Return the Trainer of a script; the script's arguments override `given`."""
    script = SCRIPTS[name]
    options = {
        "bf16": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 10**6,
        "train_sampling_strategy": "sequential", **given, **script.arguments,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **options)
    transformers.set_seed(0)
    kind = base if script.methods is object else type(base.__name__, (script.methods, base), {})
    trainer = kind(
        script.model(config),
        arguments,
        train_dataset=script.data(rows),
        eval_dataset=script.data(rows[:64]),
        data_collator=script.collate or padding,
        **script.options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# --- the measurement --------------------------------------------------------------------------------------------------


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that measures blocks of steps after the first ones."""

    def __init__(self, first: int, block: int) -> None:
        self.first, self.block, self.times = first, block, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the clock between two blocks."""
        done = state.global_step - self.first
        if done >= 0 and done % self.block == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())


Clock.__module__ = (
    "transformers.clock"  # a callback that is not the user's own: whole steps then run as in a script without it
)


def time_steps(trainer: Any, warm_up: int, block: int = BLOCK) -> dict[str, Any]:
    """Train, and return milliseconds per step, peak memory and the reported speedups."""
    clock = Clock(warm_up, block)
    trainer.add_callback(clock)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    found = {"ms": 1e3 * statistics.median(np.diff(clock.times)) / block, "gb": 0.0}
    if torch.cuda.is_available():
        found["gb"] = torch.cuda.max_memory_allocated() / 1e9
    describe = getattr(trainer, "_describe_speedups", None)
    return found | {"speedups": describe() if describe else ""}


def main() -> None:
    """Print one line per script and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in SCRIPTS if name != "LoRA" or importlib.util.find_spec("peft") is not None]
    parser.add_argument("--scripts", nargs="+", choices=known, default=known)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--tiny", action="store_true", help="two small layers, random token ids, a few steps, no GPU")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    config, rows, padding = transformers.BertConfig(num_labels=2), [], pad
    given: dict[str, Any] = {}
    if args.tiny:
        config, rows = tiny()
        given, args.batch, args.rounds = {"use_cpu": True}, [4], 1
    else:
        rows, padding = trainer_rows(engine_rows("mrpc", "train")), collator()
    about: dict[str, Any] = describe_run("cpu" if args.tiny else "cuda")
    results: dict[str, Any] = {}
    for batch in args.batch:
        given["per_device_train_batch_size"] = batch
        for name in args.scripts:
            turns: dict[str, list[dict[str, Any]]] = {kind: [] for kind in args.kinds}
            try:
                first = not results  # libraries are loaded and kernels compiled in a turn that doesn't count
                for kind in args.kinds * (args.rounds + first):
                    base = transformers.Trainer if kind == "transformers" else tunesmith.Trainer
                    skip, steps = (2, 2) if args.tiny else KINDS[kind]
                    with tempfile.TemporaryDirectory() as folder:
                        options = {**given, "max_steps": skip + steps}
                        trainer = make_trainer(name, base, folder, config, rows, padding, **options)
                        turns[kind].append(time_steps(trainer, skip, block=min(BLOCK, steps)))
                        del trainer
                found = summarize({kind: some[first:] for kind, some in turns.items()})
                times = "".join(f"{number:9.2f}" for number in found["ms"].values())
                print(f"{batch:>4} {name:<26}{times}{found['ratio']:7.2f}\n     {found['speedups']}", flush=True)
            except Exception as error:  # the other scripts can still be measured
                found = {"error": f"{type(error).__name__}: {error}"}
                print(f"{batch:>4} {name:<26} {found['error']}", flush=True)
            results.setdefault(str(batch), {})[name] = found
            if args.output:  # after each line: the machine may be taken away
                args.output.write_text(json.dumps(about | {"batches": results}, indent=1))


def summarize(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians, memory and the ratio of the first library's time to the last one's."""
    ms = {kind: statistics.median(turn["ms"] for turn in some) for kind, some in turns.items()}
    times = list(ms.values())
    gb = {kind: max(turn["gb"] for turn in some) for kind, some in turns.items()}
    return {
        "ms": ms,
        "peak_gb": gb,
        "ratio": times[0] / times[-1],
        "speedups": list(turns.values())[-1][-1]["speedups"],
    }


def tiny() -> tuple[Any, Rows]:
    """Return a small configuration and random examples."""
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rng, rows = np.random.default_rng(0), []
    for number, length in enumerate(rng.integers(4, 60, 96)):
        ids = rng.integers(5, 60, length).tolist()
        row = {
            "input_ids": ids,
            "token_type_ids": [0] * len(ids),
            "attention_mask": [1] * len(ids),
            "labels": number % 2,
        }
        rows.append(row)
    return config, rows


if __name__ == "__main__":
    main()
