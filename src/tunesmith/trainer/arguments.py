"""`TrainingArguments` that also accepts the names of older transformers versions."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import transformers

from tunesmith.errors import ConfigError, did_you_mean

log = logging.getLogger(__name__)

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "include_tokens_per_second": "include_num_input_tokens_seen",
}
DROPPED = {
    "overwrite_output_dir": "a new run replaces its own files; resume_from_checkpoint continues an old one",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR to choose where TensorBoard writes",
    "jit_mode_eval": "it has no effect",
    "save_safetensors": "weights are always saved as safetensors",
    "fp16_backend": "there is one backend",
    "half_precision_backend": "there is one backend",
    "fp16_opt_level": "there is one level",
}
SWITCHES: dict[str, tuple[str, Any]] = {
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", ["inputs"]),
}
"""Old switches -> the option and value that True stands for."""
MOVED = ("dispatch_batches", "split_batches")
"""Old options that are values of `accelerator_config` now."""


class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` that accepts old names, each with a one-line note."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **modern_names(options))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the Hub token: transformers uploads pickled arguments with the model."""
        return {**self.__dict__, "hub_token": None}


def modern_names(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options under their current names; an unknown name raises a ConfigError that suggests the nearest."""
    known = {f.name for f in dataclasses.fields(transformers.TrainingArguments) if f.init}
    out: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            out[name] = value
        elif name in RENAMED:
            log.warning("%s is called %s now", name, RENAMED[name])
            out[RENAMED[name]] = value
        elif name == "warmup_ratio":
            log.warning("warmup_ratio is called warmup_steps now (a number below 1 is a ratio)")
            if value and not options.get("warmup_steps"):
                out["warmup_steps"] = value
        elif name in SWITCHES:
            new, switched = SWITCHES[name]
            log.warning("%s is called %s=%r now", name, new, switched)
            out |= {new: switched} if value else {}
        elif name in MOVED:
            log.warning("%s is part of accelerator_config now", name)
            moved[name] = value
        elif name in DROPPED:
            log.warning("%s is not needed: %s", name, DROPPED[name])
        else:
            names = tuple(sorted(known | RENAMED.keys() | DROPPED.keys() | set(MOVED)))
            raise ConfigError(f"TrainingArguments has no {name!r}", fix=did_you_mean(name, names))
    config = out.get("accelerator_config") or {}
    if moved and not isinstance(config, dict):
        raise ConfigError(
            f"{', '.join(moved)} and accelerator_config are both set", fix="Set it in accelerator_config only."
        )
    return {**out, "accelerator_config": {**config, **moved}} if moved else out
