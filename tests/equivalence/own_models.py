"""Custom models: poolings, heads, layers, wrappers and hooks. Each function returns a new model."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from transformers.modeling_outputs import SequenceClassifierOutput

from equivalence.test_families import DISTIL, SIZES

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": {**SIZES, "pad_token_id": 0, "type_vocab_size": 2},
    "xlm-roberta": {**SIZES, "pad_token_id": 0, "type_vocab_size": 2},
    "distilbert": {**DISTIL, "max_position_embeddings": 64, "pad_token_id": 0},
    "electra": {**SIZES, "embedding_size": 16},
    "albert": {**SIZES, "embedding_size": 16},
    "mpnet": {**SIZES, "pad_token_id": 1},
    "deberta-v2": {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2},
    "modernbert": {**SIZES, "local_attention": 16},
}
QUIET = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "classifier_dropout_prob", "dropout",
         "attention_dropout", "seq_classif_dropout", "embedding_dropout", "mlp_dropout", "pooler_dropout")  # fmt: skip


def config_of(family: str, **options: Any) -> Any:
    """Return a tiny config without dropout."""
    made = transformers.AutoConfig.for_model(family, **CONFIGS[family], **options)
    for name in QUIET:
        if hasattr(made, name):
            setattr(made, name, 0.0)
    return made


def stock(family: str = "bert", **options: Any) -> Any:
    """Return transformers' classifier of an architecture."""
    transformers.set_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(config_of(family, **options))


Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def mean_of_everything(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.mean(1)


def largest(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(1)


def last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]


def first(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[:, 0]


class Pooled(nn.Module):
    """An encoder with a custom head."""

    def __init__(self, family: str, pool: Pool) -> None:
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

    def __init__(self, family: str) -> None:
        super().__init__(family, first)
        self.score, self.more = nn.Linear(32, 1), nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
        self.norm, self.calls = nn.BatchNorm1d(32), 0

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        self.calls += 1
        hidden = self.more(self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state)
        score = self.score(hidden).squeeze(-1).masked_fill(attention_mask == 0, -1e9).softmax(-1)
        logits = self.head(self.norm((hidden * score.unsqueeze(-1)).sum(1))) / (1 + 0.01 * self.calls)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits, "hidden": hidden}


class Overridden(transformers.BertForSequenceClassification):  # type: ignore[misc]
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("token_type_ids", None)
        hidden = self.bert(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.classifier(mean_of_everything(hidden, attention_mask))
        return SequenceClassifierOutput(loss=functional.cross_entropy(logits, labels), logits=logits)


class OwnLoss(transformers.BertForSequenceClassification):  # type: ignore[misc]
    """A model whose loss contains a second derivative and a weight penalty."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
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


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 3


class Odd(nn.Dropout):
    """A module named like a dropout that isn't one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(input) + input.mean(1, keepdim=True)


def changed(change: Callable[[Any], Any], family: str = "bert", **options: Any) -> Callable[[], Any]:
    """Return a function that makes transformers' model with a change."""

    def make() -> Any:
        model = stock(family, **options)
        torch.manual_seed(1)
        return change(model) or model

    return make


def replace_head(model: Any) -> None:
    model.classifier = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2))


def replace_pooler(model: Any) -> None:
    class MeanPooler(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.mean(1)

    model.bert.pooler = MeanPooler()


def replace_layer(model: Any) -> None:
    class Mixer(nn.Module):
        def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden_states + hidden_states.mean(1, keepdim=True)

    model.bert.encoder.layer[1] = Mixer()


def replace_norm(model: Any) -> None:
    class Scaled(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 0.1 * input.mean(1, keepdim=True)

    model.bert.encoder.layer[0].output.LayerNorm = Scaled(32)


def replace_embedding(model: Any) -> None:
    class Shifted(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * (1 + 0.01 * input.shape[1])

    model.set_input_embeddings(Shifted(160, 32))


def own_forward(model: Any) -> None:
    plain = model.bert.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.pooler_output = out.last_hidden_state.mean(1)
        return out

    model.bert.forward = types.MethodType(forward, model.bert)


def share_layers(model: Any) -> None:
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]


def tie_weights(model: Any) -> None:
    layers = model.bert.encoder.layer
    layers[1].attention.self.query.weight = layers[0].attention.self.query.weight
    layers[1].output.LayerNorm.bias = layers[0].output.LayerNorm.bias


def freeze_encoder(model: Any) -> None:
    model.bert.requires_grad_(False)


def normalize(model: Any) -> None:
    parametrizations.weight_norm(model.bert.encoder.layer[0].intermediate.dense)
    torch.nn.utils.spectral_norm(model.bert.encoder.layer[1].intermediate.dense)


def rescale(model: Any) -> None:
    """Change a module attribute that doesn't depend on its class."""
    model.bert.encoder.layer[0].attention.self.scaling = 1.0


def odd_dropout(model: Any) -> None:
    model.bert.encoder.layer[0].output.dropout = Odd(0.0)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def quieten(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda m: m.bert.encoder.layer[0].register_forward_hook(lambda _, a, o: o + o.mean(1, keepdim=True)),
    "forward pre": lambda m: m.bert.encoder.layer[1].attention.self.register_forward_pre_hook(
        lambda _, a, k: ((a[0] + a[0].amax(1, keepdim=True),), k), with_kwargs=True
    ),
    "pre on the model": lambda m: m.register_forward_pre_hook(
        lambda _, a, k: (a, {**k, "token_type_ids": torch.zeros_like(k["input_ids"])}), with_kwargs=True
    ),
    "full backward": lambda m: m.bert.encoder.layer[1].intermediate.dense.register_full_backward_hook(
        lambda _, gi, go: (gi[0] * (1 + gi[0].shape[1]),)
    ),
    "full backward pre": lambda m: m.bert.encoder.layer[0].output.dense.register_full_backward_pre_hook(
        lambda _, go: (go[0] / go[0].shape[1],)
    ),
    "parameter": lambda m: m.bert.encoder.layer[0].attention.self.key.weight.register_hook(lambda g: g * 0.5),
    "accumulated": lambda m: m.bert.embeddings.word_embeddings.weight.register_post_accumulate_grad_hook(quieten),
    "tensor": lambda m: m.bert.embeddings.register_forward_hook(
        lambda _, a, o: (o.register_hook(lambda g: g * g.shape[1]), o)[1]
    ),
}

OWN: dict[str, Callable[[], Any]] = {
    **{f"{pool.__name__} over {family}": (lambda f=family, p=pool: Pooled(f, p))
       for family, pool in (("bert", mean), ("roberta", largest), ("xlm-roberta", last), ("distilbert", mean_of_everything),
                            ("electra", first), ("albert", mean), ("mpnet", mean), ("deberta-v2", last),
                            ("modernbert", mean))},
    **{f"transformers' own {family}": (lambda f=family: stock(f)) for family in CONFIGS},
    **{f"{name} hook": changed(lambda m, h=hook: h(m) and None) for name, hook in HOOKS.items()},
    "attention pooling": lambda: AttentionPooled("bert"),
    "an overridden forward": lambda: (transformers.set_seed(0), Overridden(config_of("bert")))[1],
    "its own loss": lambda: (transformers.set_seed(0), OwnLoss(config_of("bert", attn_implementation="eager")))[1],
    "wrapped": changed(Wrapped),
    "another head": changed(replace_head),
    "another pooler": changed(replace_pooler),
    "another layer": changed(replace_layer),
    "another norm": changed(replace_norm),
    "different embedding": changed(replace_embedding),
    "forward overridden on an instance": changed(own_forward),
    "a layer used twice": changed(share_layers),
    "tied weights": changed(tie_weights),
    "a frozen encoder": changed(freeze_encoder),
    "parametrized weights": changed(normalize),
    "different attention scale": changed(rescale),
    "fake dropout": changed(odd_dropout),
    "gradient checkpointing": changed(checkpointed),
    "different activation": changed(lambda m: None, hidden_act="relu"),
    "hidden states requested": changed(lambda m: None, output_hidden_states=True),
    "attentions requested": changed(lambda m: m.set_attn_implementation("eager"), output_attentions=True),
    "eager attention": changed(lambda m: m.set_attn_implementation("eager")),
    "float64": changed(lambda m: m.double()),
}  # fmt: skip
