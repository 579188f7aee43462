"""`TrainingArguments` with old names accepted, what the engine reads from it (steps, epochs, plan, runtime), and the search for
better values."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import Trainer as LibraryTrainer
from transformers import TrainingArguments as LibraryArguments
from transformers.hyperparameter_search import default_hp_search_backend
from transformers.trainer_utils import HPSearchBackend, has_length

from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.training.distributed import Precision, Runtime, ddp_handler, make_runtime
from tunesmith.training.schedule import MOST_EPOCHS, Plan, Schedule

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)
trainer_log = logging.getLogger("transformers.trainer")
"""The logger that `log_level` and `log_level_replica` of the arguments set."""

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
SWITCHES: dict[str, tuple[str, Any]] = {
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", ["inputs"]),
}
"""Old switches: what True is now."""
MOVED = ("dispatch_batches", "split_batches")
"""Old options that are values of `accelerator_config` now."""


class TrainingArguments(LibraryArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` that also takes the names of older versions, each with a one-line note."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **modern_names(options))


def modern_names(options: dict[str, Any]) -> dict[str, Any]:
    """The options under their present names; an unknown name is a ConfigError that suggests the nearest."""
    known = {f.name for f in dataclasses.fields(LibraryArguments) if f.init}
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
            f"{', '.join(moved)} and accelerator_config are both given", fix="Set it in accelerator_config."
        )
    return {**out, "accelerator_config": {**config, **moved}} if moved else out


def accelerator_arguments(args: Any) -> dict[str, Any]:
    """What the Accelerator of a run is made from, under accelerate's names."""
    names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
    ddp = {name: value for name in names if (value := getattr(args, f"ddp_{name}", None)) is not None}
    return {"mixed_precision": args.mixed_precision, "kwargs_handlers": [ddp_handler(ddp)]}


def make_trainer_runtime(args: Any, built: dict[str, Any]) -> Runtime:
    """Device, ranks and precision from the arguments, with the handlers of `_build_accelerator_args`.
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
        timeout_seconds=args.ddp_timeout,
        loading={name: getattr(config, name) for name in loading},
        accumulation={**(config.gradient_accumulation_kwargs or {}), "num_steps": 1},
    )


def take_accumulation(args: Any) -> None:
    """Sets `gradient_accumulation_steps` from `gradient_accumulation_kwargs` of the accelerator_config, where that has it."""
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

    num_epochs: int
    steps_per_epoch: int
    samples: float
    batches_per_epoch: int
    num_steps: int

    def epoch_ends(self, ended: list[int]) -> tuple[int, ...]:
        """The step at which each epoch ends, those that have ended first; bounded, as epochs of a stream have no length."""
        ends = list(ended)
        while (ends[-1] if ends else 0) < self.num_steps and len(ends) < self.num_epochs:
            ends.append((ends[-1] if ends else 0) + self.steps_per_epoch)
        return tuple(ends)


def set_initial_training_values(
    trainer: Trainer, args: Any, dataloader: Any
) -> tuple[int, int, int, float, int, int, int]:
    """(epochs, steps an epoch, rows, rows over all epochs, rows a step, batches an epoch, steps); may be overridden.

    From the loader's length where it has one, else from `max_steps`, which must then be given.
    """
    per_step = trainer.get_total_train_batch_size(args)
    batches, steps = len(dataloader) if has_length(dataloader) else 0, int(args.max_steps)
    if not batches:
        if steps <= 0:
            raise ConfigError(
                f"args.max_steps must be set to a positive value if dataloader does not have a length, was {args.max_steps}"
            )
        rows = steps * per_step
        return sys.maxsize, steps, rows, float(rows), per_step, steps * args.gradient_accumulation_steps, steps
    rows = trainer.num_examples(dataloader)
    per_epoch = max(-(-batches // args.gradient_accumulation_steps), 1)
    epochs = steps / per_epoch if steps > 0 else args.num_train_epochs
    if not epochs <= MOST_EPOCHS:
        raise ConfigError(f"num_train_epochs or max_steps ask for {epochs:g} epochs; the limit is {MOST_EPOCHS}")
    samples = float(steps * per_step if steps > 0 else rows * epochs)
    steps = steps if steps > 0 else math.ceil(epochs * per_epoch)
    return math.ceil(epochs), per_epoch, rows, samples, per_step, batches, steps


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


def hyperparameter_search(
    trainer: Trainer,
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    backend: Any = None,
    hp_name: Callable[[Any], str] | None = None,
    **options: Any,
) -> Any:
    """The best run (BestRun), or one for each point of the front when there are several directions."""
    backend = HPSearchBackend(default_hp_search_backend() if backend is None else backend)
    if backend is not HPSearchBackend.OPTUNA:
        raise ConfigError(f"backend {backend.value!r} is not supported", fix="Use backend='optuna'.")
    from tunesmith.trainer.trials import TrialSearch

    search = trainer._search = TrialSearch(trainer)
    try:
        run = LibraryTrainer.hyperparameter_search
        found = run(trainer, hp_space, compute_objective, n_trials, direction, backend, hp_name, **options)
        search.take_best(found)
        return found
    finally:
        trainer.hp_search_backend = trainer._search = None
