"""Any model and script has the same losses and predictions with both Trainers, with the speedups that fit it."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations
from transformers import DataCollatorWithPadding
from transformers.modeling_outputs import SequenceClassifierOutput

from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]
BOTH = (transformers.Trainer, Trainer)
NONE, PACKED, WHOLE = (), ("packing",), ("packing", "first-token-only last layer")
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"type_vocab_size": 2},
    "xlm-roberta": {"type_vocab_size": 2},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "mpnet": {"pad_token_id": 1},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2},
    "modernbert": {"local_attention": 16},
    "roformer": {"embedding_size": 32},
}
SPEEDUPS = {"albert": PACKED, "modernbert": PACKED, "roformer": NONE}
WITHOUT_SEGMENTS = ("distilbert", "mpnet", "modernbert")


def config_of(family: str, **options: Any) -> Any:
    """Return a tiny config without dropout."""
    made = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **options})
    for name in list(vars(made)):
        if name.endswith(("dropout", "dropout_prob")) and getattr(made, name) is not None:
            setattr(made, name, 0.0)
    return made


def stock(family: str = "bert", **options: Any) -> Any:
    transformers.set_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(config_of(family, **options))


def mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def unmasked(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.mean(1)


def largest(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(1)


def last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]


class Pooled(nn.Module):
    """An encoder with a custom head."""

    def __init__(self, family: str, pool: Callable[..., torch.Tensor] = mean) -> None:
        super().__init__()
        transformers.set_seed(0)
        self.config = config_of(family)
        self.encoder = transformers.AutoModel.from_config(self.config)
        self.pool, self.head = pool, nn.Linear(32, 2)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.encoder(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.head(self.pool(hidden, attention_mask))
        return SequenceClassifierOutput(loss=functional.cross_entropy(logits, labels), logits=logits)


class AttentionPooled(Pooled):
    """Attention pooling with extra layers, batch norm and a call counter."""

    def __init__(self) -> None:
        super().__init__("bert")
        self.score, self.more = nn.Linear(32, 1), nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
        self.norm, self.calls = nn.BatchNorm1d(32), 0

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        self.calls += 1
        hidden = self.more(self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state)
        score = self.score(hidden).squeeze(-1).masked_fill(attention_mask == 0, -1e9).softmax(-1)
        logits = self.head(self.norm((hidden * score.unsqueeze(-1)).sum(1))) / (1 + 0.01 * self.calls)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Overridden(transformers.BertForSequenceClassification):  # type: ignore[misc]
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.classifier(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state.mean(1))
        return SequenceClassifierOutput(loss=functional.cross_entropy(logits, labels), logits=logits)


class OwnLoss(transformers.BertForSequenceClassification):  # type: ignore[misc]
    """A model whose loss contains a second derivative and a weight penalty."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        with torch.enable_grad():
            embedded = self.get_input_embeddings()(input_ids)
            out = super().forward(attention_mask=attention_mask, labels=labels, inputs_embeds=embedded, **kwargs)
            (slope,) = torch.autograd.grad(out.loss, embedded, create_graph=True)
        out.loss = out.loss + slope.square().sum() + 1e-3 * self.get_input_embeddings().weight.square().sum()
        return out


class Wrapped(nn.Module):
    """A module that wraps a model, like adapters do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask, **kwargs).logits * self.scale
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Odd(nn.Dropout):
    """A module named like a dropout that reads padding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * 2 + input.mean(1, keepdim=True)


class Mixer(nn.Module):
    """A layer that reads padding."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states + hidden_states.mean(1, keepdim=True)


def changed(change: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    """Return a function that makes a BERT classifier with a change."""

    def make() -> Any:
        model = stock(**options)
        torch.manual_seed(1)
        return change(model) or model

    return make


def own_forward(model: Any) -> None:
    plain = model.bert.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.pooler_output = out.last_hidden_state.mean(1)
        return out

    model.bert.forward = types.MethodType(forward, model.bert)


def replace_parts(model: Any) -> None:
    model.bert.encoder.layer[1] = Mixer()
    model.bert.encoder.layer[0].output.dropout = Odd(0.0)


def tie_weights(model: Any) -> None:
    layers = model.bert.encoder.layer
    layers[1].attention.self.query.weight = layers[0].attention.self.query.weight


def normalize(model: Any) -> None:
    parametrizations.weight_norm(model.bert.encoder.layer[0].intermediate.dense)
    torch.nn.utils.spectral_norm(model.bert.encoder.layer[1].intermediate.dense)


HOOKS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "forward": (
        lambda m: m.bert.encoder.layer[0].register_forward_hook(lambda _, a, o: o + o.mean(1, keepdim=True)),
        NONE,
    ),
    "pre on the model": (
        lambda m: m.register_forward_pre_hook(
            lambda _, a, k: (a, {**k, "token_type_ids": torch.zeros_like(k["input_ids"])}), with_kwargs=True
        ),
        PACKED,
    ),
    "full backward": (
        lambda m: m.bert.encoder.layer[1].intermediate.dense.register_full_backward_hook(
            lambda _, gi, go: (gi[0] * (1 + gi[0].shape[1]),)
        ),
        NONE,
    ),
    "parameter": (
        lambda m: m.bert.encoder.layer[0].attention.self.key.weight.register_hook(lambda g: g * 0.5),
        WHOLE,
    ),
    "accumulated": (
        lambda m: m.bert.embeddings.word_embeddings.weight.register_post_accumulate_grad_hook(
            lambda p: [p.grad.mul_(0.1)].clear()
        ),
        WHOLE,
    ),
    "tensor": (
        lambda m: m.bert.embeddings.register_forward_hook(
            lambda _, a, o: (o.requires_grad and o.register_hook(lambda g: g * g.shape[1]), o)[1]
        ),
        NONE,
    ),
}
MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    **{f"transformers' own {family}": (partial(stock, family), SPEEDUPS.get(family, WHOLE)) for family in FAMILIES},
    **{f"{pool.__name__} over {family}": (partial(Pooled, family, pool), PACKED)
       for family, pool in (("bert", mean), ("roberta", largest), ("deberta-v2", last), ("modernbert", mean))},
    **{f"{name} hook": (changed(lambda m, h=hook: h(m) and None), on) for name, (hook, on) in HOOKS.items()},
    "unmasked mean": (partial(Pooled, "distilbert", unmasked), NONE),
    "attention pooling": (AttentionPooled, NONE),
    "overridden forward": (lambda: (transformers.set_seed(0), Overridden(config_of("bert")))[1], NONE),
    "own loss": (lambda: (transformers.set_seed(0), OwnLoss(config_of("bert", attn_implementation="eager")))[1], PACKED),
    "wrapped": (changed(Wrapped), PACKED),
    "forward overridden on an instance": (changed(own_forward), NONE),
    "parts that read padding": (changed(replace_parts), NONE),
    "another head": (changed(lambda m: setattr(m, "classifier", nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 2)))), WHOLE),
    "tied weights": (changed(tie_weights), WHOLE),
    "parametrized weights": (changed(normalize), NONE),
    "frozen encoder": (changed(lambda m: m.bert.requires_grad_(False) and None), WHOLE),
    "another activation": (changed(lambda m: None, hidden_act="relu"), WHOLE),
    "attentions requested": (changed(lambda m: m.set_attn_implementation("eager"), output_attentions=True), NONE),
    "float64": (changed(lambda m: m.double()), WHOLE),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Any:
    return arrow(40)


def same(make: Any, data: Any, folder: Path, **options: Any) -> Any:
    """Assert equal losses of six steps in a fixed order; return the Trainers."""
    callbacks, found = options.pop("callbacks", None), []
    for kind in BOTH:
        model = make()
        if getattr(getattr(model, "config", None), "model_type", "") in WITHOUT_SEGMENTS:
            data = data.remove_columns([name for name in ("token_type_ids",) if name in data.column_names])
        settings = {"max_steps": 6, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 3e-4}
        settings |= {"train_sampling_strategy": "sequential"}
        collator = DataCollatorWithPadding(tokenizer())
        args = arguments(folder / kind.__module__, **settings, **options)
        trainer = kind(model, args, train_dataset=data, data_collator=collator, callbacks=callbacks)
        trainer.model_accepts_loss_kwargs = False  # models that accept any keyword don't use the number of items
        trainer.train()
        found.append((trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]))
    assert len(set(found[1][1])) == 6, "nothing was trained"
    assert found[1][1] == pytest.approx(found[0][1], abs=2e-5)
    return [trainer for trainer, _ in found]


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_any_model_match_transformers(name: str, rows: Any, tmp_path: Path) -> None:
    make, speedups = MODELS[name]
    theirs, ours = same(make, rows, tmp_path)
    assert ours._packed.on == speedups
    assert getattr(ours.model, "calls", 0) == getattr(theirs.model, "calls", 0)
    predictions = [trainer.predict(rows.select(range(8))).predictions for trainer in (theirs, ours)]
    logits = [found[0] if isinstance(found, tuple) else found for found in predictions]
    assert np.allclose(*logits, atol=1e-4)


@pytest.mark.parametrize(("labels", "of"), [(1, float), (3, lambda label: [float(label), 1.0, 0.0])])
def test_regression_and_several_labels_match_transformers(labels: int, of: Any, rows: Any, tmp_path: Path) -> None:
    kind = "regression" if labels == 1 else "multi_label_classification"
    data = rows.map(lambda row: {"labels": of(row["label"])}, remove_columns=["label"])
    same(partial(stock, num_labels=labels, problem_type=kind), data, tmp_path)


@pytest.mark.parametrize("kind", ["forward_hook", "full_backward_pre_hook"])
def test_hooks_on_all_modules_are_called_as_in_transformers(kind: str, rows: Any, tmp_path: Path) -> None:
    def change(module: nn.Module, first: Any, second: Any = None) -> Any:
        if type(module).__name__ not in ("BertIntermediate", "BertOutput"):
            return None
        given = second if kind == "forward_hook" else first
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


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Return the scripts of bench/scripts_gpu.py: class weights, FGM, R-Drop, distillation, LoRA, collators and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
        import scripts_gpu
    return scripts_gpu


ONLY_PACKED = ("custom model class", "LoRA", "siamese", "token classification")
SCRIPTS = (
    *("unmodified", "lower half frozen", "accumulation 2", "compute_loss override", "compute_loss_func", *ONLY_PACKED),
    *(
        "collator function",
        "two workers",
        "torch dataset",
        "label smoothing",
        "gradient checkpointing",
        "FGM",
        "R-Drop",
    ),
    *("distillation", "layer-wise learning rates", "shuffled dataset"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_of_any_script_match_transformers(name: str, scripts: Any, tmp_path: Path) -> None:
    config, data = scripts.tiny()
    given = {"max_steps": 8, "use_cpu": True, "logging_steps": 1, "per_device_train_batch_size": 4, "bf16": False}
    seen = []
    for kind in BOTH:
        trainer = scripts.make_trainer(name, kind, tmp_path / kind.__module__, config, data, scripts.pad, **given)
        trainer.train()
        seen.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert seen[1] == pytest.approx(seen[0], abs=2e-5)
    assert trainer._packed.on == (
        NONE if name == "gradient checkpointing" else PACKED if name in ONLY_PACKED else WHOLE
    )
