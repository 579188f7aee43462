"""With speedups, results match transformers in any script, and user code sees the plain model."""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithPadding,
    TrainerCallback,
)

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


def with_labels(of: Any) -> Any:
    return arrow(40).map(lambda row: {"labels": of(row["label"])}, remove_columns=["label"])


SCRIPTS: dict[str, dict[str, Any]] = {
    "unmodified": {},
    "class weights": {"mixin": Weighted},
    "collator and class weights": {"mixin": Weighted, "data_collator": own_collator},
    "torch dataset": {"train_dataset": Rows()},
    "train_test_split": {"train_dataset": arrow(60).train_test_split(0.3, seed=0)["train"]},
    "max_length": {"data_collator": DataCollatorWithPadding(tokenizer(), padding="max_length", max_length=40)},
    "accumulation": {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "regression": {"model": partial(bert, num_labels=1), "train_dataset": with_labels(float)},
    "multi-label": {
        "model": partial(bert, num_labels=3, problem_type="multi_label_classification"),
        "train_dataset": with_labels(lambda label: [float(label), 1.0, 0.0]),
    },
    "compute_loss_func": {
        "compute_loss_func": lambda out, y, num_items_in_batch: functional.cross_entropy(out.logits, y)
    },
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_packed_script_equals_transformers(script: str, tmp_path: Path) -> None:
    options = dict(SCRIPTS[script])
    mixins = [options.pop("mixin")] if "mixin" in options else []
    model = options.pop("model", bert)
    seen = []
    for kind in BOTH:
        trainer = make(type("Own", (*mixins, kind), {"__module__": kind.__module__}), tmp_path, model(), **options)
        trainer.train()
        rows = options.get("train_dataset", arrow(15, seed=2))
        seen.append((losses(trainer), trainer.predict(rows).predictions, trainer))
    assert seen[1][2]._packed.on == ("packing", "first-token-only last layer")
    assert seen[1][0] == pytest.approx(seen[0][0], abs=2e-5)
    assert np.allclose(seen[1][1], seen[0][1], atol=1e-4)


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


def test_unknown_model_runs_plain_and_says_why(tmp_path: Path) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(100, 2)

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            logits = self.table(input_ids)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    trainer = make(Trainer, tmp_path, Bag(), max_steps=1)
    trainer.train()
    assert trainer._describe_speedups() == (
        "Speedups: none. Packing is off because Bag does not fit, no description of its parts is known."
    )


class Pooled(nn.Module):
    """A custom model with an encoder; `masked=False` reads padding."""

    def __init__(self, encoder: Any = None, masked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = encoder or bert().bert, nn.Linear(32, 2)
        self.masked, self.calls = masked, 0

    def embed(self, input_ids: Any, attention_mask: Any) -> Any:
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float() if self.masked else torch.ones(*hidden.shape[:2], 1)
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        self.calls += 1
        logits = self.head(self.embed(input_ids, attention_mask))
        return {"loss": None if labels is None else functional.cross_entropy(logits, labels), "logits": logits}


class Siamese(Pooled):
    """Two calls of the same encoder, and a loss over the pairs of a batch."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        first, second = self.embed(input_ids, attention_mask), self.embed(input_ids.flip(0), attention_mask.flip(0))
        scores = functional.normalize(first) @ functional.normalize(second).T
        return {"loss": functional.cross_entropy(20 * scores, torch.arange(len(scores)).flip(0)), "logits": scores}


def token_classifier() -> Any:
    torch.manual_seed(0)
    return BertForTokenClassification(bert().config)


def with_lora() -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(bert(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def small(name: str) -> Any:
    """Return a classifier with attention by distance."""
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
    if name == "mpnet":
        return transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SIZES, **none))
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}
    return transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**SIZES, **none, **options))


def tagged(features: list[Any]) -> Any:
    batch = own_collator(features)
    return {**batch, "labels": torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 2, -100)}


def token_loss(outputs: Any, labels: Any, **_: Any) -> Any:
    return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


class Adversarial:
    """FGM: a second pass with moved embeddings, in training_step."""

    def training_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        model.train()
        loss = self.compute_loss(model, inputs)  # type: ignore[attr-defined]
        self.accelerator.backward(loss)  # type: ignore[attr-defined]
        table = self.model.get_input_embeddings().weight  # type: ignore[attr-defined]
        kept, step = table.data.clone(), table.grad / table.grad.norm()
        table.data.add_(0.5 * step)
        self.accelerator.backward(self.compute_loss(model, inputs))  # type: ignore[attr-defined]
        table.data.copy_(kept)
        return loss.detach()


class Repeated:
    """R-Drop: two passes and the distance of their outputs; distillation from a frozen teacher."""

    teacher = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        self.teacher = self.teacher or bert(initializer_range=0.1).eval()
        first, second = model(**inputs), model(**inputs)
        with torch.no_grad():
            taught = self.teacher(**inputs).logits.softmax(-1)
        loss = first.loss + second.loss + functional.mse_loss(first.logits, second.logits + 0.1)
        loss = loss + functional.cross_entropy(first.logits, taught)
        return (loss, first) if return_outputs else loss


class Sampled:
    """A custom sampler."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


WHOLE = ("packing", "first-token-only last layer")
INSIDE: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "mean pooling": (Pooled, {}, ("packing",)),
    "unmasked mean": (partial(Pooled, masked=False), {}, ()),
    "siamese": (Siamese, {}, ("packing",)),
    "token classification": (token_classifier, {"data_collator": tagged}, ("packing",)),
    "token classes, own loss": (token_classifier, {"data_collator": tagged, "compute_loss_func": token_loss}, ()),
    "lora": (with_lora, {}, ("packing",)),
    "mpnet": (partial(small, "mpnet"), {}, WHOLE),
    "deberta": (partial(small, "deberta"), {}, WHOLE),
    "deberta inside": (lambda: Pooled(small("deberta").deberta), {}, ("packing",)),
    "fgm": (bert, {"mixin": Adversarial}, WHOLE),
    "r-drop and distillation": (bert, {"mixin": Repeated}, WHOLE),
    "sampler": (bert, {"mixin": Sampled}, WHOLE),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("script", INSIDE)
def test_packed_encoder_in_any_model_equals_transformers(script: str, tmp_path: Path) -> None:
    model, options, on = INSIDE[script]
    options = dict(options)
    mixins = [options.pop("mixin")] if "mixin" in options else []
    seen = []
    for kind in BOTH:
        own = type("Own", (*mixins, kind), {"__module__": kind.__module__})
        trainer = make(own, tmp_path, model(), max_steps=8, **options)
        trainer.train()
        seen.append((losses(trainer), trainer.predict(arrow(15, seed=2)).predictions, trainer))
    assert seen[1][2]._packed.on == on
    assert seen[1][0] == pytest.approx(seen[0][0], abs=2e-5)
    assert np.allclose(seen[1][1], seen[0][1], atol=1e-4)
    assert getattr(seen[1][2].model, "calls", 0) == getattr(seen[0][2].model, "calls", 0)


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


def test_dense_batches_of_an_encoder_stay_padded() -> None:
    packed = packed_calls.PackedCalls(Pooled())._packed[0]
    for lengths, packs in (([9, 9, 8], False), ([9, 2, 3], True)):
        mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
        found = packed.lengths_of({"input_ids": torch.full((3, 9), 7), "attention_mask": mask})
        assert (found is not None) is packs


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


KNOWN = {"5.22.2": "aa4895b272cdc1c8"}


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


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_equal_transformers(name: str, tmp_path: Path) -> None:
    """On a GPU, these steps are CUDA graphs; here, they run one by one."""

    class Whole(Trainer):
        _force_captured_steps = True

    seen = []
    for kind in (transformers.Trainer, Whole):
        trainer = make(kind, tmp_path, save_strategy="steps", save_steps=4, **CAPTURED[name])
        trainer.train()
        logs = [{k: v for k, v in line.items() if "time" not in k and "second" not in k and k != "total_flos"}
                for line in trainer.state.log_history]  # fmt: skip
        seen.append((logs, trainer))
    assert seen[1][1].model.config._attn_implementation == "sdpa"
    tolerance = {"abs": 2e-2} if name == "bf16" else {"abs": 2e-5, "rel": 1e-3}
    for ours, theirs in zip(seen[1][0], seen[0][0], strict=True):
        assert ours == pytest.approx(theirs, **tolerance)


def test_captured_steps_resume_exactly_with_dropout(tmp_path: Path) -> None:
    class Whole(Trainer):
        _force_captured_steps = True

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
