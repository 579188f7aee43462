"""What a Trainer's checkpoint belongs to: what a resume compares before its first step. docs/reliability.md lists it."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from tunesmith.encoder.adapters import has_adapters
from tunesmith.keep.checkpoint import Identity, content_mark
from tunesmith.keep.record import Wording
from tunesmith.ranks.sharding import gathered
from tunesmith.run.environment import package_versions
from tunesmith.run.sealed import read_manifest
from tunesmith.tokens.token_encoder import padded_fingerprint
from tunesmith.trainer.content import code_of, content_of, settings_of
from tunesmith.trainer.upstream import PreTrainedTokenizerBase, trainer_log

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

MATHS_NAMES = """
    seed data_seed train_sampling_strategy dataloader_drop_last length_column_name ignore_data_skip remove_unused_columns
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args optim_target_modules
    weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor neftune_noise_alpha
    average_tokens_across_devices bf16 fp16 tf32 torch_compile use_liger_kernel label_names
"""
MATHS = tuple(MATHS_NAMES.split())
"""Arguments that decide about the weights: another value is another experiment, and refused."""
REPORTED = ("num_train_epochs", "max_steps", "metric_for_best_model", "greater_is_better")
"""Arguments that a script may change to train longer or to evaluate otherwise. The schedule, or what is best, depends on
them, so that is reported."""
IDLE_NAMES = "architectures dtype torch_dtype transformers_version problem_type id2label label2id"
IDLE_CONFIG = frozenset(IDLE_NAMES.split())
"""Entries of a model's config that change by loading, saving or the first batch; labels are compared by themselves."""
WORDING = Wording(
    "Put it back, set Trainer.allow_changed_data = True to resume all the same, or load the weights with from_pretrained "
    "and start a new run.",
    "train(resume_from_checkpoint=True) resumes from here",
    option="",
)
OVERRIDES = ("compute_loss", "training_step", "get_train_dataloader", "create_optimizer", "create_scheduler")


def trainer_identity(trainer: Trainer, dataset: Any, model_mark: str, run_id: str, rows_per_step: int) -> Identity:
    """The identity of a run. `dataset` is what the loader reads; `model_mark` is from before any speed-up."""
    args = trainer.args
    config: dict[str, Any] = {"rows_per_step": rows_per_step}
    config |= {name: _plain(getattr(args, name)) for name in MATHS if hasattr(args, name)}
    data = content_of(dataset)
    config |= {
        "the training data": content_mark(data),
        "the model": model_mark,
        "adapters": has_adapters(trainer.model),
    }
    config["the collator"] = content_mark(settings_of(trainer.data_collator))
    config["the tokenizer"] = tokenizer_mark(
        trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    )
    labels = getattr(getattr(trainer.model, "config", None), "id2label", None) or {}
    names = {"names": [str(labels[k]) for k in sorted(labels)]}
    return Identity(run_id, data, config, names, {**package_versions(), **_loud(trainer, dataset)})


def _loud(trainer: Trainer, dataset: Any) -> dict[str, str | None]:
    """What may differ but is reported: length, evaluation, device, and code, of which only the user knows what it means."""
    own = {name: getattr(trainer, name) for name in OVERRIDES if trainer.overrides(name)}
    code = {
        "the collator": trainer.data_collator,
        "compute_loss_func": trainer.compute_loss_func,
        "compute_metrics": trainer.compute_metrics,
        "the dataset": getattr(type(dataset), "__getitem__", getattr(type(dataset), "__iter__", None)),
        "the dataset's transform": (getattr(dataset, "format", None) or {}).get("format_kwargs", {}).get("transform"),
        **own,
    }
    marks = {f"the code of {name}": content_mark(text) for name, value in code.items() if (text := code_of(value))}
    if str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) != "no":
        marks["the evaluation data"] = content_mark(content_of(trainer.eval_dataset))
    told = {name: str(getattr(trainer.args, name)) for name in REPORTED}
    return {**told, **marks, "device": trainer.runtime.device.type, "python": platform.python_version()}


def model_mark(model: Any) -> str:
    """A hash of what a model computes with, its weights aside: the checkpoint brings those."""
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    kept = {k: v for k, v in settings.items() if k not in IDLE_CONFIG and not k.startswith("_")}
    modules = [f"{n} {type(m).__name__.removeprefix('FSDP')}({m.extra_repr()})" for n, m in model.named_modules()]
    weights = [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]
    frozen = [frozen_content(model)] if has_adapters(model) else []  # a checkpoint of adapters has no other weights
    text = json.dumps([kept, modules, weights, *frozen], sort_keys=True, default=str)
    return content_mark(re.sub(r" at 0x[0-9a-f]+", "", text))


def frozen_content(model: Any) -> str:
    """A hash of all weights of a model that are not trained. With fsdp all processes call it."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            digest.update(name.encode())
            digest.update(gathered(weight.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_mark(processor: Any) -> str | None:
    """A hash of a tokenizer's or processor's settings; None where it cannot be known."""
    try:
        if isinstance(processor, PreTrainedTokenizerBase):
            return content_mark(padded_fingerprint(processor, processor.model_max_length))
        return content_mark(processor.to_json_string()) if hasattr(processor, "to_json_string") else None
    except Exception as error:  # a tokenizer of the user's own may lack any of it
        trainer_log.debug("the tokenizer is not compared on resume: %s", error)
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return (
        value if isinstance(value, (str, int, float, bool, type(None))) else json.loads(json.dumps(value, default=str))
    )


def run_id_of(folder: Any) -> str:
    """The run a checkpoint belongs to."""
    return str(read_manifest(folder)["run_id"])
