"""Custom models have the same losses with both Trainers at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers import DataCollatorWithPadding

from equivalence.own_models import OWN, stock
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer

WITHOUT_SEGMENTS = ("distilbert", "mpnet", "modernbert")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


@pytest.fixture(scope="module")
def rows() -> Any:
    return arrow(40)


def losses(kind: Any, model: Any, data: Any, folder: Path, **options: Any) -> list[float]:
    """Return the losses of six steps in a fixed order."""
    if getattr(getattr(model, "config", None), "model_type", "") in WITHOUT_SEGMENTS:
        data = data.remove_columns("token_type_ids")
    settings = {"max_steps": 6, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 3e-4}
    callbacks = options.pop("callbacks", None)
    trainer = kind(
        model,
        arguments(folder, **settings, train_sampling_strategy="sequential", **options),
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer()),
        callbacks=callbacks,
    )
    trainer.model_accepts_loss_kwargs = False  # models that accept any keyword don't use the number of items
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def same(make: Any, data: Any, folder: Path, **options: Any) -> list[float]:
    theirs, ours = (losses(kind, make(), data, folder, **options) for kind in (transformers.Trainer, Trainer))
    assert len(ours) == 6
    assert len(set(ours)) > 5, "nothing was trained"
    assert ours == pytest.approx(theirs, abs=2e-5)
    return ours


@pytest.mark.parametrize("name", OWN)
def test_custom_model_losses_match_transformers(name: str, rows: Any, tmp_path: Path) -> None:
    same(OWN[name], rows, tmp_path)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_on_all_modules_are_called_as_in_transformers(kind: str, rows: Any, tmp_path: Path) -> None:
    def change(module: nn.Module, first: Any, second: Any = None) -> Any:
        if type(module).__name__ not in ("BertIntermediate", "BertOutput"):
            return None
        given = first if kind.endswith("pre_hook") else second if kind == "forward_hook" else first
        if isinstance(given, tuple):
            return tuple(None if x is None else x * (1 + x.shape[1] / 100) for x in given)
        return given * (1 + given.shape[1] / 100)

    handle = getattr(global_hooks, f"register_module_{kind}")(change)
    try:
        same(stock, rows, tmp_path)
    finally:
        handle.remove()


def test_model_changed_by_callback_is_trained(rows: Any, tmp_path: Path) -> None:
    class Changes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            model.bert.encoder.layer[0].register_forward_hook(lambda m, a, o: o + o.mean(1, keepdim=True))

        def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            if state.global_step == 5:
                model.bert.pooler.activation = nn.Softsign()

    same(stock, rows, tmp_path, callbacks=[Changes()])
