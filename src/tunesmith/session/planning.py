"""The plan of a run from its config: how many steps, at which rate, when to evaluate and save."""

from __future__ import annotations

from tunesmith.config.schema import RunConfig
from tunesmith.engine.plan import Calendar, Plan, Schedule, epoch_ends_for, warmup_steps_for
from tunesmith.errors import ConfigError
from tunesmith.metrics.suite import Suite
from tunesmith.tokens.batches import Batches

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
