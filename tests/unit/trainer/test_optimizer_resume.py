"""With any optimizer and scheduler, a resumed run is bit-identical to an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import TrainerCallback

from trainer_toys import Noisy, RegressionDataset, arguments, lasting, weights_of
from tunesmith import Trainer
from tunesmith.errors import ConfigError

Make = Callable[[Any], Any]


class WithOptimizer(Trainer):
    """Trainer with optimizer and scheduler from `make_optimizer` and `make_scheduler`."""

    make_optimizer: Any = None
    make_scheduler: Any = None

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None and self.make_optimizer is not None:
            self.optimizer = type(self).make_optimizer(self.model)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None and self.make_scheduler is not None:
            self.lr_scheduler = type(self).make_scheduler(self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)


def repeats(folder: Path, *, optimizer: Make | None = None, scheduler: Make | None = None, **options: Any) -> Any:
    """Train 12 steps and the last 7 again from a checkpoint; assert equal weights and return the resumed Trainer."""
    kind = type("Kind", (WithOptimizer,), {"make_optimizer": optimizer, "make_scheduler": scheduler})

    def train(name: str, callbacks: Callable[[], list[Any]] = list, resume: str | None = None, **options: Any) -> Any:
        args = arguments(folder / name, save_strategy="steps", save_steps=5, max_steps=12, logging_steps=2, **options)
        trainer = kind(Noisy(), args, train_dataset=RegressionDataset(length=46), callbacks=callbacks())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train("whole", **options)
    again = train("again", resume=str(folder / "whole" / "checkpoint-5"), **options)
    expected, got = weights_of(whole), weights_of(again)
    assert got.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(got[n], expected[n])] == []
    assert lasting(again.state.log_history) == lasting(whole.state.log_history)
    for mine, other in zip(again.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        assert sorted(map(repr, {**mine, "params": None}.items())) == sorted(
            map(repr, {**other, "params": None}.items())
        )
    return again


PLAIN_STEPS = {
    "Adafactor": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"foreach": True},
    "ASGD": {"t0": 2, "lambd": 0.1},
    "NAdam": {},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
"""Optimizers of torch with different kinds of state."""


@pytest.mark.parametrize("name", PLAIN_STEPS)
def test_torch_optimizers_resume_exactly(tmp_path: Path, name: str) -> None:
    repeats(
        tmp_path, optimizer=lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.01, **PLAIN_STEPS[name])
    )


SCHEDULERS: dict[str, Make] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=12),
    "CyclicLR-own-shape": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.05, step_size_up=3, scale_fn=lambda x: 0.9**x),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 8, 8]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.MultiStepLR(o, [2, 5])], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, total_iters=8), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_schedulers_resume_exactly(tmp_path: Path, name: str) -> None:
    repeats(
        tmp_path,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        scheduler=SCHEDULERS[name],
    )


def test_one_cycle_scheduler_resumes_with_its_betas(tmp_path: Path) -> None:
    again = repeats(tmp_path, scheduler=SCHEDULERS["OneCycleLR"])
    assert isinstance(again.optimizer.param_groups[0]["betas"], tuple)


def test_passed_optimizer_and_scheduler_resume_exactly(tmp_path: Path) -> None:
    def train(folder: Path, resume: str | None) -> Any:
        model = Noisy()
        optimizer = torch.optim.AdamW([{"params": model.inner.parameters()}, {"params": model.outer.parameters()}])
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=12)
        args = arguments(folder, save_strategy="steps", save_steps=5, max_steps=12)
        trainer = Trainer(model, args, train_dataset=RegressionDataset(), optimizers=(optimizer, scheduler))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train(tmp_path / "whole", None)
    again = train(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-5"))
    expected, got = weights_of(whole), weights_of(again)
    assert [n for n in expected if not torch.equal(got[n], expected[n])] == []
    assert again.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()


def test_group_settings_of_a_callback_survive_resume(tmp_path: Path) -> None:
    class Decay(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if state.global_step == 3:
                optimizer.param_groups[0]["weight_decay"] = 0.7

    again = repeats(tmp_path, callbacks=lambda: [Decay()])
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.7


class Elaborate(torch.optim.Optimizer):
    """Stores state like Prodigy and schedule-free: numbers, flags and tensors in groups, nested values, and extra state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "k": 0, "weight_sum": 0.0, "train_mode": False, "past": ()})

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared = self.state.setdefault("everything", {"steps": 0})  # type: ignore[arg-type, call-overload]
        shared["steps"] += 1
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            group["d"] = max(group["d"], 1e-3 * shared["steps"])
            group["seen"] = group.get("seen", torch.zeros(2)) + torch.tensor([1.0, group["d"]])
            group["past"] = (*group["past"][-2:], float(group["seen"].sum()), float("inf"))
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("recent", []).append(p.grad.clone())
                del state["recent"][:-3]
                state["by_step"] = {shared["steps"]: ("last", True)}
                mean = torch.stack(state["recent"]).mean(0)
                p -= group["d"] * mean * (1 + 0.01 * group["k"] + group["weight_sum"] + min(group["past"]))


def test_custom_optimizer_resumes_with_its_full_state(tmp_path: Path) -> None:
    again = repeats(tmp_path, optimizer=lambda model: Elaborate(model.parameters()))
    assert again.optimizer.param_groups[0]["k"] == 12
    assert again.optimizer.state["everything"] == {"steps": 12}
    assert next(iter(again.optimizer.state.values()))["by_step"] == {12: ("last", True)}


class OwnWay(torch.optim.SGD):
    """Saves and loads its own state, with a number that is in neither groups nor state."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["momentum"] = 0.9 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict(state_dict["inner"])


def test_custom_optimizer_state_methods_are_called(tmp_path: Path) -> None:
    again = repeats(tmp_path, optimizer=lambda model: OwnWay(model.parameters(), lr=0.01, momentum=0.5))
    assert again.optimizer.optimizer.count == 12


def test_state_that_needs_pickle_is_named(tmp_path: Path) -> None:
    class Opaque(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["projector"] = object()
            return super().step(closure)

    with pytest.raises(ConfigError, match=r"projector.*object"):
        repeats(tmp_path, optimizer=lambda model: Opaque(model.parameters(), lr=0.01))
