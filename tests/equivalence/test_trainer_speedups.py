"""Speedups of Trainer: results equal transformers', inside any script, and the user's own calls see the plain model."""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, TrainerCallback

from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer
from tunesmith.errors import ResourceError
from tunesmith.speedups import packed_calls

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
BOTH = (transformers.Trainer, Trainer)


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SIZES, **dropout, max_position_embeddings=64, **options))


def make(kind: Any, folder: Path, model: Any = None, **given: Any) -> Any:
    names = ("train_dataset", "eval_dataset", "data_collator", "callbacks", "compute_metrics", "compute_loss_func")
    parts = {n: given.pop(n) for n in names if n in given}
    options = {"max_steps": 12, "logging_steps": 1, "learning_rate": 1e-3, **given}
    data = {"train_dataset": arrow(40), "eval_dataset": arrow(20, seed=1), "processing_class": tokenizer(), **parts}
    return kind(bert() if model is None else model, arguments(folder / kind.__module__, **options), **data)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


class Weighted:
    """Class weights in compute_loss, as in transformers' documentation."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([3.0, 1.0]))
        return (loss, outputs) if return_outputs else loss


class Rows(torch.utils.data.Dataset[Any]):
    """A torch Dataset of dicts."""

    def __init__(self, length: int = 40) -> None:
        self.rows = [
            {k: r[k] for k in ("input_ids", "token_type_ids", "attention_mask", "label")} for r in arrow(length)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def own_collator(features: list[Any]) -> Any:
    width = max(len(f["input_ids"]) for f in features) + 3
    names = ("input_ids", "token_type_ids", "attention_mask")
    out = {n: torch.tensor([f[n] + [0] * (width - len(f[n])) for f in features]) for n in names}
    return {**out, "labels": torch.tensor([f["label"] for f in features])}


SCRIPTS: dict[str, dict[str, Any]] = {
    "unmodified": {},
    "class weights": {"mixin": Weighted},
    "collator and class weights": {"mixin": Weighted, "data_collator": own_collator},
    "torch dataset": {"train_dataset": Rows()},
    "train_test_split": {"train_dataset": arrow(60).train_test_split(0.3, seed=0)["train"]},
    "max_length": {"data_collator": DataCollatorWithPadding(tokenizer(), padding="max_length", max_length=40)},
    "accumulation": {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "compute_loss_func": {
        "compute_loss_func": lambda out, y, num_items_in_batch: functional.cross_entropy(out.logits, y)
    },
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_packed_script_equals_transformers(script: str, tmp_path: Path) -> None:
    options = dict(SCRIPTS[script])
    mixins = [options.pop("mixin")] if "mixin" in options else []
    seen = []
    for kind in BOTH:
        trainer = make(type("Own", (*mixins, kind), {"__module__": kind.__module__}), tmp_path, **options)
        trainer.train()
        seen.append((losses(trainer), trainer.predict(arrow(15, seed=2)).predictions, trainer))
    assert seen[1][2]._packed.on == ("packing", "first-token-only last layer")
    assert seen[1][0] == pytest.approx(seen[0][0], abs=2e-5)
    assert np.allclose(seen[1][1], seen[0][1], atol=1e-4)


def test_user_calls_in_callbacks_and_metrics_see_the_plain_model(tmp_path: Path) -> None:
    """Fails if the last layer stays cut to first tokens outside of a training step."""
    shapes: list[Any] = []
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6, 7, 8]]), "attention_mask": torch.ones(1, 6, dtype=torch.long)}

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            shapes.append(tuple(model.bert(**batch).last_hidden_state.shape))

    def metrics(_: Any) -> dict[str, float]:
        shapes.append(tuple(trainer.model.bert(**batch).last_hidden_state.shape))
        return {}

    trainer = make(Trainer, tmp_path, callbacks=[Look()], compute_metrics=metrics, max_steps=2)
    trainer.train()
    trainer.evaluate()
    assert trainer._packed.on
    assert set(shapes) == {(1, 6, 32)}
    assert trainer.model.config._attn_implementation == "sdpa"


def test_hidden_states_in_prediction_step_equal_transformers(tmp_path: Path) -> None:
    class Pooled:
        def prediction_step(self, model: Any, inputs: Any, loss_only: bool, ignore_keys: Any = None) -> Any:
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                out = super().compute_loss(model, {**inputs, "output_hidden_states": True}, return_outputs=True)[1]  # type: ignore[misc]
            return None, out.hidden_states[-1].mean(1).detach(), inputs["labels"]

    found = [make(type("Own", (Pooled, k), {}), tmp_path).predict(arrow(15)).predictions for k in BOTH]
    assert np.allclose(found[0], found[1], atol=1e-5)


class Twice:
    """SimCSE: two rows per example."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        doubled = {k: v.repeat_interleave(2, 0) for k, v in inputs.items() if k != "labels"}
        logits = model(**doubled).logits
        loss = functional.cross_entropy(50 * logits @ logits.T, torch.arange(len(logits)))
        return (loss, {"logits": logits[::2]}) if return_outputs else loss


class Pairs:
    """Chosen and rejected rows in one batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        scores = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits[:, 0]
        loss = -functional.logsigmoid(scores[::2] - scores[1::2]).mean()
        return (loss, {"logits": scores}) if return_outputs else loss


@pytest.mark.parametrize("mixin", [Twice, Pairs])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_scale_equals_transformers(mixin: Any, accumulation: int, tmp_path: Path) -> None:
    seen = []
    for kind in BOTH:
        own = type("Own", (mixin, kind), {"__module__": kind.__module__})
        trainer = make(own, tmp_path, gradient_accumulation_steps=accumulation, max_steps=4)
        trainer.train()
        norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
        seen.append([*losses(trainer), *norms])
    assert seen[1] == pytest.approx(seen[0], rel=1e-3)


def test_speedup_that_differs_is_dropped_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_calls.PackedCalls, "_compare", lambda self, given: "loss 1 instead of 2")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    seen = []
    with caplog.at_level(logging.INFO, logger="transformers"):
        for kind in BOTH:
            trainer = make(kind, tmp_path, log_level="info")
            trainer.train()
            seen.append(losses(trainer))
    lines = {r.getMessage() for r in caplog.records if r.getMessage().startswith("Speedups")}
    assert lines == {
        "Speedups: packing, first-token-only last layer.",
        "Speedups: none. Packing is off because it changes the result (loss 1 instead of 2).",
    }
    assert seen[1] == seen[0]


def test_comparison_notices_a_wrong_packed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = packed_calls.PackedCalls.pack

    def shifted(self: Any, given: Any) -> Any:
        packed = real(self, given)
        if packed is not None:
            packed["position_ids"] = packed["position_ids"] + 1
        return packed

    monkeypatch.setattr(packed_calls.PackedCalls, "pack", shifted)
    trainer = make(Trainer, tmp_path, max_steps=2)
    trainer.train()
    assert trainer._packed.on == ()
    assert "changes the result" in trainer._packed.off["packing"]


def test_unknown_model_runs_plain_and_says_why(tmp_path: Path) -> None:
    class Own(BertForSequenceClassification):  # type: ignore[misc]
        pass

    trainer = make(Trainer, tmp_path, Own(bert().config), max_steps=1)
    trainer.train()
    assert "Own is not transformers' own" in trainer._describe_speedups()


def test_second_thread_is_refused_while_one_trains(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    class Other(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            def train() -> None:
                try:
                    make(Trainer, tmp_path / "other", max_steps=1).train()
                except ResourceError as error:
                    errors.append(error)

            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    make(Trainer, tmp_path, callbacks=[Other()], max_steps=1).train()
    assert "another thread" in str(errors[0])


OVERRIDDEN = (
    "_save_checkpoint", "_run_epoch", "_init_training_state", "_load_from_checkpoint", "_load_best_model", "train",
    "_load_optimizer_and_scheduler", "_load_rng_state", "_get_eval_sampler", "_get_grad_norm", "_finalize_training",
)  # fmt: skip
KNOWN = {"5.22.2": "e0a8e0692d548af4"}


def test_overridden_methods_of_transformers_are_those_we_know() -> None:
    """If it fails for a new version: compare these methods with their overrides, then add the version."""
    bodies = "".join(inspect.getsource(getattr(transformers.Trainer, name)) for name in OVERRIDDEN)
    found = hashlib.sha256(bodies.encode()).hexdigest()[:16]
    assert found in KNOWN.values(), f"transformers {transformers.__version__}: {found}"


WHOLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 3},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_steps_equal_transformers(name: str, tmp_path: Path) -> None:
    """On a GPU these steps are CUDA graphs; here they run one by one."""

    class Whole(Trainer):
        _force_whole_steps = True

    seen = []
    for kind in (transformers.Trainer, Whole):
        trainer = make(kind, tmp_path, save_strategy="steps", save_steps=4, **WHOLE[name])
        trainer.train()
        logs = [{k: v for k, v in line.items() if "time" not in k and "second" not in k and k != "total_flos"}
                for line in trainer.state.log_history]  # fmt: skip
        seen.append((logs, trainer))
    assert seen[1][1].model.config._attn_implementation == "sdpa"
    tolerance = {"abs": 2e-2} if name == "bf16" else {"abs": 2e-5, "rel": 1e-3}
    for ours, theirs in zip(seen[1][0], seen[0][0], strict=True):
        assert ours == pytest.approx(theirs, **tolerance)


def test_whole_steps_resume_exactly_with_dropout(tmp_path: Path) -> None:
    class Whole(Trainer):
        _force_whole_steps = True

    def run(folder: Path, **more: Any) -> Any:
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=64))
        trainer = make(Whole, folder, model, save_strategy="steps", save_steps=3)
        trainer.train(**more)
        return trainer

    whole = run(tmp_path / "1")
    again = run(tmp_path / "2", resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-6")
    assert losses(again) == losses(whole)
    ends = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
