"""`TrainingArguments` with old names accepted, and what the engine reads from it: steps, epochs, plan, runtime."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from dataclasses import dataclass
from typing import Any

from tunesmith.engine.plan import MOST_EPOCHS, Plan, Schedule
from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.ranks.runtime import Precision, Runtime, ddp_handler, make_runtime
from tunesmith.ranks.sharding_options import read_sharding
from tunesmith.trainer.fields import refused
from tunesmith.trainer.upstream import library

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
    "jit_mode_eval": "it has no use here",
    "save_safetensors": "weights are always safetensors",
    "fp16_backend": "there is one backend",
    "half_precision_backend": "there is one backend",
    "fp16_opt_level": "there is one level",
}

MOVED = ("dispatch_batches", "split_batches")
"""Old options that are values of `accelerator_config` now."""


class TrainingArguments(library.TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` that also takes the names of older versions, each with a one-line note."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **modern_names(options))


def modern_names(options: dict[str, Any]) -> dict[str, Any]:
    """The options under their present names; an unknown name is a ConfigError that suggests the nearest."""
    known = {f.name for f in dataclasses.fields(library.TrainingArguments) if f.init}
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
        elif name == "group_by_length":
            log.warning("group_by_length is called train_sampling_strategy='group_by_length' now")
            out |= {"train_sampling_strategy": "group_by_length"} if value else {}
        elif name == "include_inputs_for_metrics":
            log.warning("include_inputs_for_metrics is called include_for_metrics=['inputs'] now")
            out |= {"include_for_metrics": ["inputs"]} if value else {}
        elif name in MOVED:
            log.warning("%s is part of accelerator_config now", name)
            moved[name] = value
        elif name in DROPPED:
            log.warning("%s is not needed: %s", name, DROPPED[name])
        else:
            names = tuple(sorted(known | set(RENAMED) | set(DROPPED) | set(MOVED)))
            raise ConfigError(f"TrainingArguments has no {name!r}", fix=did_you_mean(name, names))
    config = out.get("accelerator_config") or {}
    if moved and not isinstance(config, dict):
        raise ConfigError(
            f"{', '.join(moved)} and accelerator_config are both given", fix="Set it in accelerator_config."
        )
    return {**out, "accelerator_config": {**config, **moved}} if moved else out


def check_arguments(args: Any) -> None:
    """Refuses every field that is set to something this Trainer does not do: all of them at once."""
    problems = refused(args)
    if problems:
        raise ConfigError("; ".join(problems), where="TrainingArguments", problems=tuple(problems))


def accelerator_arguments(args: Any) -> dict[str, Any]:
    """What the Accelerator of a run is made from, under accelerate's names."""
    names = {
        "ddp_find_unused_parameters": "find_unused_parameters",
        "ddp_bucket_cap_mb": "bucket_cap_mb",
        "ddp_broadcast_buffers": "broadcast_buffers",
        "ddp_static_graph": "static_graph",
    }
    ddp = {new: getattr(args, old) for old, new in names.items() if getattr(args, old, None) is not None}
    return {"mixed_precision": args.mixed_precision, "kwargs_handlers": [ddp_handler(ddp)]}


def make_trainer_runtime(args: Any, built: dict[str, Any]) -> Runtime:
    """Device, ranks and precision as the arguments ask for them, with the handlers that `_build_accelerator_args` built.
    fp16 on a CPU is float32, as in transformers."""
    own = accelerator_arguments(args)
    other = [name for name, value in built.items() if name != "kwargs_handlers" and own.get(name) != value]
    if other:
        raise ConfigError(
            f"_build_accelerator_args sets {', '.join(other)}, which has no effect here",
            fix="Change its kwargs_handlers only; precision and the rest come from TrainingArguments.",
        )
    precision: Precision = args.mixed_precision if args.mixed_precision in ("bf16", "fp16") else "no"
    if precision == "fp16" and args.device.type == "cpu":
        log.warning("fp16=True has no effect on a CPU: the run trains in float32. bf16=True works there")
        precision = "no"
    config = args.accelerator_config
    loading = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
    return make_runtime(
        precision=precision,
        use_cpu=args.use_cpu,
        handlers=built["kwargs_handlers"],
        sharding=read_sharding(args.fsdp, args.fsdp_config),
        timeout_seconds=args.ddp_timeout,
        loading={name: getattr(config, name) for name in loading},
        accumulation={**(config.gradient_accumulation_kwargs or {}), "num_steps": 1},
    )


def take_accumulation(args: Any) -> None:
    """Sets `gradient_accumulation_steps` where `gradient_accumulation_kwargs` of the accelerator_config says it instead."""
    asked = (args.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps")
    if asked is None:
        return
    if args.gradient_accumulation_steps not in (1, asked):
        raise ConfigError(
            "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is greater than 1 "
            f"({asked} and {args.gradient_accumulation_steps})",
            where="TrainingArguments",
            fix="Set one of the two.",
        )
    args.gradient_accumulation_steps = asked


def rows_per_rank(args: Any, batch_size: int, world: int) -> int:
    """The rows of a rank's batch: `batch_size`, or its share of it with `split_batches`."""
    if not args.accelerator_config.split_batches or world == 1:
        return batch_size
    if batch_size % world:
        raise ConfigError(
            f"with split_batches a batch of {batch_size} rows is split over {world} ranks, which leaves a remainder",
            where="TrainingArguments",
            fix=f"Use a batch size that is a multiple of {world}, or leave split_batches out of accelerator_config.",
        )
    return batch_size // world


@dataclass(frozen=True)
class Horizon:
    """How long a run is, worked out as transformers does."""

    num_steps: int
    num_epochs: int
    steps_per_epoch: int
    batches_per_epoch: int
    samples: float

    def epoch_ends(self, ended: list[int]) -> tuple[int, ...]:
        """The step each epoch ends at, from those that ended already on; bounded, as a stream's epochs have no length."""
        ends = list(ended)
        while (ends[-1] if ends else 0) < self.num_steps and len(ends) < self.num_epochs:
            ends.append((ends[-1] if ends else 0) + self.steps_per_epoch)
        return tuple(ends)


def make_horizon(args: Any, *, batches: int | None, rows: int | None, rows_per_step: int) -> Horizon:
    """From the loader's length where it has one, else from `max_steps`, which must then be given."""
    if not batches:
        if args.max_steps <= 0:
            raise ConfigError(
                f"args.max_steps must be set to a positive value if dataloader does not have a length, was {args.max_steps}"
            )
        steps = int(args.max_steps)
        return Horizon(
            steps, sys.maxsize, steps, steps * args.gradient_accumulation_steps, float(steps * rows_per_step)
        )
    per_epoch = max(-(-batches // args.gradient_accumulation_steps), 1)
    epochs = args.max_steps / per_epoch if args.max_steps > 0 else args.num_train_epochs
    if not epochs <= MOST_EPOCHS:
        raise ConfigError(f"num_train_epochs or max_steps ask for {epochs:g} epochs; the limit is {MOST_EPOCHS}")
    if args.max_steps > 0:
        steps = int(args.max_steps)
        return Horizon(steps, -(-steps // per_epoch), per_epoch, batches, float(steps * rows_per_step))
    steps = math.ceil(args.num_train_epochs * per_epoch)
    samples = (rows if rows is not None else batches * rows_per_step) * args.num_train_epochs
    return Horizon(steps, math.ceil(args.num_train_epochs), per_epoch, batches, float(samples))


def run_length(
    args: Any, batches: int | None, rows: int | None, per_step: int
) -> tuple[int, int, int, float, int, int, int]:
    """(epochs, steps an epoch, rows, rows over all epochs, rows a step, batches an epoch, steps), as transformers gives them."""
    h = make_horizon(args, batches=batches, rows=rows, rows_per_step=per_step)
    rows = h.num_steps * per_step if rows is None else rows
    return h.num_epochs, h.steps_per_epoch, rows, h.samples, per_step, h.batches_per_epoch, h.num_steps


def plan_from_arguments(args: Any, horizon: Horizon, *, ended: list[int], read_at_once: bool) -> Plan:
    """The engine's plan. When to evaluate, save and stop is decided by callbacks; the rate by the scheduler object."""
    return Plan(
        num_steps=horizon.num_steps,
        epoch_ends=horizon.epoch_ends(ended),
        schedule=Schedule("constant", args.learning_rate, 0, horizon.num_steps),
        seed=args.seed,
        max_grad_norm=args.max_grad_norm,
        # Numbers stay on a GPU until a log line, an evaluation or a checkpoint wants them.
        read_back_every=1 if read_at_once else 50,
    )
