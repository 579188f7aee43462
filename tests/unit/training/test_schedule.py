"""Every schedule equals transformers' get_scheduler at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from tunesmith.config.options import SCHEDULE_OPTIONS
from tunesmith.errors import ConfigError
from tunesmith.training.schedule import SCHEDULES, Schedule, lr_at

CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-6}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("cosine_with_min_lr", {"min_lr": 1e-6}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-6, "warmup_lr_rate": 0.05}),
    ("warmup_stable_decay", {"num_decay_steps": 12}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 9, "min_lr_ratio": 0.1, "warmup_type": "cosine", "decay_type": "1-sqrt"},
    ),
    ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "1-sqrt", "decay_type": "linear"}),
]


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_rate_equals_transformers_at_every_step(kind: str, options: dict[str, Any], warmup: int) -> None:
    total, peak = 53, 5e-5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    oracle = get_scheduler(
        kind,
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=dict(options),
    )
    ours = Schedule(kind, peak, warmup, total, options)
    for step in range(total + 5):
        assert lr_at(step, ours) == pytest.approx(oracle.get_last_lr()[0], abs=1e-12 * peak, rel=1e-12)
        optimizer.step()
        oracle.step()


def test_every_schedule_is_covered_above() -> None:
    assert {kind for kind, _ in CASES} == set(SCHEDULES)


def test_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'linear'"):
        Schedule("liner", 1e-3, 0, 10)


def test_a_schedule_with_a_floor_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="min_lr"):
        lr_at(0, Schedule("cosine_with_min_lr", 1e-3, 0, 10))


def test_the_config_knows_the_options_that_transformers_takes_for_each_schedule() -> None:
    import inspect

    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for kind, names in SCHEDULE_OPTIONS.items():
        taken = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)]).parameters) - given
        assert set(names) == taken, kind
    assert set(SCHEDULE_OPTIONS) == set(SCHEDULES)
