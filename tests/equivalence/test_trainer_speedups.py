"""With speedups, results match transformers in any script, and user code sees the plain model."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainerCallback,
)

from tiny_model import mood, save_tiny_bert
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer
from tunesmith.errors import ResourceError
from tunesmith.pipeline.train import finetune
from tunesmith.speedups import packed_calls, packing
from tunesmith.trainer import captured_steps

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
    names = (
        *("train_dataset", "eval_dataset", "data_collator", "callbacks", "compute_metrics", "compute_loss_func"),
        "optimizers",
    )
    parts = {n: given.pop(n) for n in names if n in given}
    options = {"max_steps": 12, "logging_steps": 1, "learning_rate": 1e-3, **given}
    data = {"train_dataset": arrow(40), "eval_dataset": arrow(20, seed=1), "processing_class": tokenizer(), **parts}
    return kind(bert() if model is None else model, arguments(folder / kind.__module__, **options), **data)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_user_calls_in_callbacks_and_metrics_see_the_plain_model(tmp_path: Path) -> None:
    """Fails if the last layer computes only first tokens outside of a training step."""
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


def test_speedup_that_differs_is_dropped_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_calls.PackedCalls, "_compare", lambda self: "loss 1 instead of 2")
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
    real = packed_calls.PackedModule.pack

    def shifted(self: Any, given: Any) -> Any:
        packed = real(self, given)
        packed["position_ids"] = packed["position_ids"] + 1
        return packed

    monkeypatch.setattr(packed_calls.PackedModule, "pack", shifted)
    trainer = make(Trainer, tmp_path, max_steps=2)
    trainer.train()
    assert trainer._packed.on == ()
    assert "changes the result" in trainer._packed.off["packing"]


def language_model(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a tiny model and the options of its script: causal, masked, or a classifier with NEFTune."""
    torch.manual_seed(0)
    data = arrow(40).remove_columns(["label"])
    if kind == "neftune":
        return bert(), {"neftune_noise_alpha": 5.0}
    words = tokenizer()
    words.mask_token = words.convert_ids_to_tokens(4)
    collator = transformers.DataCollatorForLanguageModeling(words, mlm=kind == "masked")
    options = {"data_collator": collator, "train_dataset": data, "eval_dataset": data}
    if kind == "masked":
        return transformers.BertForMaskedLM(bert().config), options
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), options


@pytest.mark.parametrize("kind", ["causal", "masked", "neftune"])
def test_language_models_and_neftune_equal_transformers(kind: str, tmp_path: Path) -> None:
    seen = []
    for trainer_kind in BOTH:
        model, options = language_model(kind)
        trainer = make(trainer_kind, tmp_path, model, max_steps=20, gradient_accumulation_steps=2, **options)
        trainer.train()
        seen.append((losses(trainer), trainer))
    assert len(seen[0][0]) == 20
    assert seen[1][0] == pytest.approx(seen[0][0], abs=2e-5)
    assert seen[1][1]._packed is None or ("packing" in seen[1][1]._packed.on) is (kind == "masked")


def test_second_thread_is_refused_while_one_trains(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    bert_folder = save_tiny_bert(tmp_path / "bert")

    class Other(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            def train() -> None:
                command = {"model_name_or_path": bert_folder, "output_dir": tmp_path / "run", "cache_dir": tmp_path}
                for job in (
                    lambda: make(Trainer, tmp_path / "other", max_steps=1).train(),
                    lambda: finetune(train_data=mood(), use_cpu=True, max_steps=1, **command),
                ):
                    with pytest.raises(ResourceError, match="another thread") as caught:
                        job()
                    errors.append(caught.value)

            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    make(Trainer, tmp_path, callbacks=[Other()], max_steps=1).train()
    assert len(errors) == 2


KNOWN = {"5.22.2": "75eab916aeccf086"}


def test_overridden_methods_of_transformers_are_those_we_know() -> None:
    """If this fails for a new transformers version, compare these methods with their overrides, then add the version."""
    theirs = vars(transformers.Trainer)
    names = sorted(n for n, value in vars(Trainer).items() if inspect.isfunction(value) and n in theirs)
    bodies = "".join(inspect.getsource(theirs[name]) for name in names)
    found = hashlib.sha256(bodies.encode()).hexdigest()[:16]
    assert found in KNOWN.values(), f"transformers {transformers.__version__}: {found}"


CAPTURED: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 3},
    "bf16": {"bf16": True},
}


@pytest.fixture
def whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU. There, these steps are CUDA graphs; here, they run one by one."""
    monkeypatch.setattr(Trainer, "_on_gpu", True)
    monkeypatch.setattr(captured_steps, "has_triton", lambda: True)


@pytest.mark.parametrize("name", CAPTURED)
def test_graph_steps_equal_transformers(name: str, tmp_path: Path, whole_steps: None) -> None:
    seen = []
    for kind in (transformers.Trainer, Trainer):
        trainer = make(kind, tmp_path, save_strategy="steps", save_steps=4, **CAPTURED[name])
        trainer.train()
        logs = [{k: v for k, v in line.items() if "time" not in k and "second" not in k and k != "total_flos"}
                for line in trainer.state.log_history]  # fmt: skip
        seen.append((logs, trainer))
    assert seen[1][1].model.config._attn_implementation == "sdpa"
    tolerance = {"abs": 2e-2} if name == "bf16" else {"abs": 2e-5, "rel": 1e-3}
    for ours, theirs in zip(seen[1][0], seen[0][0], strict=True):
        assert ours == pytest.approx(theirs, **tolerance)


def padded(features: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Collate without a tokenizer."""
    width = max(len(row["input_ids"]) for row in features)
    ids = torch.zeros(len(features), width, dtype=torch.long)
    for number, row in enumerate(features):
        ids[number, : len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
    labels = torch.tensor([int(row["label"]) for row in features])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, **more}


def truncated(features: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate a random part of each row."""
    parts = [1 + int(torch.rand(()) * (len(row["input_ids"]) - 1)) for row in features]
    return padded([{**row, "input_ids": row["input_ids"][:n]} for row, n in zip(features, parts, strict=True)])


def trained(trainer: Any) -> Any:
    trainer.train()
    return trainer


def left_padded(features: list[dict[str, Any]]) -> dict[str, Any]:
    batch = padded(features)
    return {n: t.flip(1) if t.ndim == 2 else t for n, t in batch.items()}


class Listed(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, Any]:
        return arrow(40)[number]


USER_DATA: dict[str, dict[str, Any]] = {
    "collator": {"data_collator": padded},
    "accumulation": {"data_collator": padded, "gradient_accumulation_steps": 2},
    "random collator": {"data_collator": truncated},
    "dataset": {"train_dataset": Listed()},
    "shuffled": {"train_dataset": arrow(40).shuffle(seed=3)},
    "workers": {"dataloader_num_workers": 2, "data_collator": truncated},
}


@pytest.mark.parametrize("name", USER_DATA)
def test_graph_steps_of_user_batches_equal_transformers(name: str, tmp_path: Path, whole_steps: None) -> None:
    theirs, ours = (trained(make(kind, tmp_path, **USER_DATA[name])) for kind in BOTH)
    assert ours._captured is not None
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-5)
    norms = [[line["grad_norm"] for line in t.state.log_history if "grad_norm" in line] for t in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


class LayerRates:
    """A lower learning rate for the embeddings."""

    def create_optimizer(self, model: Any = None) -> Any:
        inside = list(self.model.bert.embeddings.parameters())  # type: ignore[attr-defined]
        others = [p for n, p in self.model.named_parameters() if ".embeddings." not in n]  # type: ignore[attr-defined]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": inside, "lr": 1e-4}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        return self.optimizer


@pytest.mark.parametrize("name", ["layer-wise learning rates", "optimizer", "label smoothing"])
def test_graph_steps_with_rates_or_smoothing_equal_transformers(name: str, tmp_path: Path, whole_steps: None) -> None:
    seen = []
    for kind in BOTH:
        if name == "optimizer":
            model = bert()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            trainer = make(kind, tmp_path, model, optimizers=(optimizer, None))
        elif name == "label smoothing":
            trainer = make(kind, tmp_path, label_smoothing_factor=0.2)
        else:
            trainer = make(type("Own", (LayerRates, kind), {"__module__": kind.__module__}), tmp_path)
        seen.append(trained(trainer))
    assert seen[1]._captured is not None
    assert losses(seen[1]) == pytest.approx(losses(seen[0]), abs=2e-5)
    rates = [[line["learning_rate"] for line in t.state.log_history if "learning_rate" in line] for t in seen]
    assert rates[1] == rates[0]
    for one, other in zip(*(t.optimizer.param_groups for t in seen), strict=True):
        assert one["lr"] == other["lr"]
        assert "lr_scale" not in one


def test_other_optimizers_leave_the_steps_to_transformers(tmp_path: Path, whole_steps: None) -> None:
    class Sgd(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
            return self.optimizer

    trainer = trained(make(Sgd, tmp_path, max_steps=2))
    assert trainer._captured is None
    assert "whole step is off because the optimizer is not torch's AdamW" in trainer._describe_speedups()


def test_graph_steps_of_random_batches_resume_as_in_transformers(tmp_path: Path, whole_steps: None) -> None:
    """transformers collates two batches before it restores the generators; so does the step of a resumed epoch here."""
    found = []
    for kind in BOTH:
        options = {"data_collator": truncated, "save_strategy": "steps", "save_steps": 3, "max_steps": 9}
        first = trained(make(kind, tmp_path / "1", **options))
        again = make(kind, tmp_path / "2", **options)
        again.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-3")
        found.append(losses(again)[-6:])
    assert found[1] == pytest.approx(found[0], abs=2e-5)


def test_other_batches_leave_the_epoch_to_transformers(tmp_path: Path, whole_steps: None) -> None:
    """Packing a batch with padding on the left would change positions."""
    theirs, ours = (trained(make(kind, tmp_path, data_collator=left_padded)) for kind in BOTH)
    assert ours._captured is None
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-5)
    lines = (Path(ours.args.output_dir) / "journal.jsonl").read_text()
    assert "CUDA graph of the whole step is off because batches are not rows of tokens with one label each" in lines


def test_later_batch_that_is_not_packed_equals_transformers(tmp_path: Path, whole_steps: None) -> None:
    def mixed() -> Any:
        kinds = itertools.cycle([padded, left_padded])
        return lambda features: next(kinds)(features)

    theirs, ours = (trained(make(kind, tmp_path, data_collator=mixed(), max_steps=5)) for kind in BOTH)
    assert ours._captured is not None
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-5)


def test_graph_steps_resume_exactly_with_dropout(tmp_path: Path, whole_steps: None) -> None:
    def run(folder: Path, **more: Any) -> Any:
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=64))
        trainer = make(Trainer, folder, model, save_strategy="steps", save_steps=3)
        trainer.train(**more)
        return trainer

    whole = run(tmp_path / "1")
    again = run(tmp_path / "2", resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-6")
    assert losses(again) == losses(whole)
    ends = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_graph_steps_report_a_speedup_that_is_switched_off(
    tmp_path: Path, whole_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = packing._keep_first_tokens

    def wrong(layer: Any, args: Any, kwargs: Any) -> Any:
        found = own(layer, args, kwargs)
        return found if found is None else ((1.5 * found[0][0], *found[0][1:]), found[1])

    wrong.__module__ = own.__module__
    monkeypatch.setattr(packing, "_keep_first_tokens", wrong)
    trainer = make(Trainer, tmp_path, max_steps=3)
    trainer.train()
    lines = (Path(trainer.args.output_dir) / "journal.jsonl").read_text()
    assert lines.count("cls_only_last_layer is off: its results differ from those of the plain step") == 1
