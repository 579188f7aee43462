"""The plan of a run from its config (how many steps, at which rate, when to evaluate and save), its identity, and one line
about the whole run as soon as its first steps are measured: time, memory, disk.

The identity is what a checkpoint is compared with when it is resumed. docs/concepts/reliability.md lists its fields.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.data.batches import Batches
from tunesmith.data.read import DataBundle
from tunesmith.data.tokenize import padded_fingerprint
from tunesmith.data.tokens import Sampling
from tunesmith.errors import ConfigError
from tunesmith.events import Event, StepDone
from tunesmith.metrics.table import Suite
from tunesmith.models.load import LoadedModel
from tunesmith.models.model_files import read_config_file
from tunesmith.models.resolve import EMBEDDED
from tunesmith.pipeline.watch import Say
from tunesmith.runs.environment import package_versions
from tunesmith.runs.writing import known_hash
from tunesmith.speedups.in_force import Strategies
from tunesmith.training.checkpoint import Identity, content_mark
from tunesmith.training.distributed import Runtime, has_triton
from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for, warmup_steps_for

if TYPE_CHECKING:
    from tunesmith.pipeline.prepare import Prepared

STEPS_A_READ = 16
"""Steps on a GPU whose numbers are read together: the host is ahead of the device in between."""
CRASH_INTERVAL = 500
"""Steps between checkpoints within a long epoch, so that a crash never costs more."""


def make_plan(config: RunConfig, batches: Batches, suite: Suite, *, has_validation: bool, on_gpu: bool = False) -> Plan:
    """The frozen plan that the loop follows."""
    steps, ends = epoch_ends_for(
        batches.steps_in_epoch, max_steps=config.max_steps, num_epochs=config.decided.num_train_epochs
    )
    schedule = Schedule(
        config.lr_scheduler_type,
        config.decided.learning_rate,
        warmup_steps_for(config.decided.warmup_steps, steps),
        steps,
        config.lr_scheduler_kwargs,
    )
    evaluate = _evaluation_calendar(config, steps, ends, has_validation)
    keeps_best = evaluate.cadence != "no" and config.load_best_model_at_end is not False
    metric = config.metric_for_best_model or suite.metric_for_best_model
    greater = suite.greater_is_better(metric) if config.greater_is_better is None else config.greater_is_better
    return Plan(
        steps,
        ends,
        schedule,
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        nan_action=config.nan_action,
        evaluate=evaluate,
        save=_save_calendar(config, steps, ends, evaluate),
        read_back_every=STEPS_A_READ if on_gpu else 1,
        metric=metric if keeps_best or config.early_stopping_patience is not None else None,
        greater_is_better=greater,
        patience=config.early_stopping_patience,
        min_delta=config.early_stopping_threshold,
    )


def _evaluation_calendar(config: RunConfig, steps: int, ends: tuple[int, ...], has_validation: bool) -> Calendar:
    strategy = config.eval_strategy or ("epoch" if has_validation else "no")
    if strategy != "no" and not has_validation:
        raise ConfigError(
            "--eval_strategy needs validation data",
            fix="Give --validation_file, or a --validation_split_fraction above 0.",
        )
    if strategy == "no":
        return Calendar("no")
    every = _interval(config.evaluation_steps, steps) if strategy == "steps" else 0
    per_epoch = ends[0]
    delay = config.eval_delay * (per_epoch if strategy == "epoch" else 1)
    return Calendar(strategy, every, frozenset(ends), steps, delay)


def _save_calendar(config: RunConfig, steps: int, ends: tuple[int, ...], evaluate: Calendar) -> Calendar:
    strategy = config.save_strategy
    if strategy in ("no", "best"):
        return Calendar("no")
    if strategy == "steps":
        return Calendar("steps", _interval(config.save_steps, steps), last=steps)
    if strategy == "epoch":
        return Calendar("epoch", ends=frozenset(ends), last=steps)
    if evaluate.cadence == "steps":
        return Calendar("steps", evaluate.every, last=steps)
    return Calendar("both", CRASH_INTERVAL, frozenset(ends), steps)


def _interval(value: int | float | None, steps: int) -> int:
    """Steps, or a share of all steps below 1."""
    if value is None:
        return 500
    return max(1, int(steps * value)) if 0 < value < 1 else int(value)


INERT_NAMES = """
    output_dir run_name save_strategy save_steps save_total_limit save_only_model resume_from_checkpoint weights_only
    logging_strategy logging_steps logging_first_step disable_tqdm report_to project preprocessing_num_workers
    overwrite_cache cache_dir allow_changed_data allow_download dataloader_num_workers dataloader_pin_memory
    train_file validation_file test_file test_split_name max_predict_samples model_name_or_path tokenizer_name
    config_name model_revision use_cpu auto_find_batch_size ddp_timeout time_budget
    strict_data labels_file
"""
INERT = frozenset(INERT_NAMES.split())
"""Options that may differ when a run is resumed: they change neither data order nor maths. Data, model and tokenizer are
compared by content, whatever file or name they come from."""
IDLE_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Entries of a model's config.json that say where it comes from, not what it computes."""


def make_identity(
    config: RunConfig, bundle: DataBundle, folder: Path, tokenizer: Any, *, max_length: int, runtime: Runtime
) -> Identity:
    """What a checkpoint of this run is compared with on resume: options that matter; data, model and tokenizer by content."""
    options = {k: _plain(v) for k, v in to_dict(config).items() if k not in INERT}
    options |= {_name_of(split): content_mark(found) for split, found in bundle.split_fingerprints.items()}
    options["columns"] = [*bundle.columns.text, bundle.columns.label]
    options["the tokenizer"] = content_mark(padded_fingerprint(tokenizer, max_length))
    stored = {k: v for k, v in read_config_file(folder).items() if k not in IDLE_CONFIG}
    options["the config of the base model"] = content_mark(json.dumps(stored, sort_keys=True))
    weights = sorted(folder.glob("model*.safetensors"))
    options["the weights of the base model"] = content_mark(*(f"{p.name} {known_hash(p)}" for p in weights))
    options["eval_steps"] = config.evaluation_steps
    options["bf16"] = runtime.precision == "bf16"  # asked for, or what the device does by itself
    options["processes"] = runtime.world  # each has a batch of its own: another number is another experiment
    versions = {**package_versions(), "device": runtime.device.type}
    return Identity(
        _run_id(options, bundle.fingerprint), bundle.fingerprint, options, bundle.labels.to_json(), versions
    )


def with_choices(identity: Identity, sampling: Sampling, runtime: Runtime) -> Identity:
    """The same with the order of rows and the precision, once they are known: what is best depends on model and device."""
    options = {**identity.config, "train_sampling_strategy": sampling, "bf16": runtime.precision == "bf16"}
    return replace(identity, run_id=_run_id(options, identity.data), config=options)


def _name_of(split: str) -> str:
    return f"the {'training' if split == 'train' else split} data"


def _run_id(options: dict[str, Any], data: str) -> str:
    return hashlib.sha256(json.dumps([options, data], sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def say_model(
    say: Say, config: RunConfig, loaded: LoadedModel, strategies: Strategies, runtime: Runtime, plain: str | None = None
) -> None:
    """The model, what it computes in (`plain` is why in float32), and which speed-ups are on."""
    count = loaded.parameters
    size = f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"
    name = config.model_name_or_path or EMBEDDED
    say(f"Model: {name}, {size} parameters, on {runtime.device}.")
    if runtime.precision == "bf16" and config.bf16 is None:
        say("Precision: bf16, as this GPU has it (weights stay float32); --no_bf16 computes in float32.")
    if plain is not None:
        say(f"Precision: float32, {plain}; --bf16 for bf16.")
    asked = config.train_sampling_strategy or config.token_budget
    if asked is None and strategies.best_order(runtime.device) == "random":
        say("Order: random, as batches have no padding here; --train_sampling_strategy names another.")
    for note in (*loaded.notes, *strategies.notes):
        say(f"{note[0].upper()}{note[1:]}.")
    # where triton keeps compiled kernels for all runs of a user
    home = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton"
    kernels = Path(os.environ.get("TRITON_CACHE_DIR") or home / "cache")
    if runtime.device.type == "cuda" and has_triton() and not any(kernels.glob("*")):
        say(f"Kernels: compiled for this GPU now and kept in {kernels}: the first start takes longer, others do not.")
    if strategies.on:
        say(f"Exact speed-ups: {', '.join(strategies.on)}.")


WARM_STEPS, TIMED_STEPS = 3, 10
FEWEST_STEPS = 40
"""A shorter run is over before its forecast is worth a line."""


def announce_plan(prepared: Prepared, plan: Plan, say: Say) -> Callable[[Event], None]:
    """A listener that says once how long the steps will take, by the tokens of the first ones."""
    timed: list[StepDone] = []

    def on(event: Event) -> None:
        if not isinstance(event, StepDone) or plan.num_steps < FEWEST_STEPS or len(timed) >= TIMED_STEPS:
            return
        if event.step > max(WARM_STEPS, plan.read_back_every):  # the steps of one read share its time
            timed.append(event)
        if len(timed) == TIMED_STEPS:
            say(_sentence(prepared, plan, timed))

    return on


def _sentence(prepared: Prepared, plan: Plan, timed: list[StepDone]) -> str:
    batches = prepared.batches
    tokens = float(batches.rows.lengths.sum()) / batches.steps_in_epoch(0) / batches.world
    seconds = sum(s.seconds for s in timed) / max(sum(s.tokens for s in timed), 1) * tokens * plan.num_steps
    took = (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
    weights = sum(p.numel() * p.element_size() for p in prepared.state.model.parameters())
    disk = weights * (3 + 1 + 1)  # a checkpoint has the weights and two moments; best/ and model/ have the weights
    return (
        f"Plan: {plan.num_steps:,} steps take about {took}, {peak_bytes(prepared) / 1e6:,.0f} MB of memory so far, "
        f"about {disk / 1e6:,.0f} MB on disk."
    )


def peak_bytes(prepared: Prepared) -> int:
    """The most memory held so far: of the device where there is one, else of this process."""
    if prepared.runtime.device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
