"""CUDA graphs of encoders, with a CPU stand-in: a replay recomputes the captured results in the same memory."""

from __future__ import annotations

import copy
import gc
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from tunesmith import Trainer
from tunesmith.errors import NumericsError
from tunesmith.speedups import model_graphs
from tunesmith.speedups.model_graphs import ModelGraphs, encoders_of
from tunesmith.speedups.verify import float_tensors

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 80, "pad_token_id": 0,
}  # fmt: skip


class StandIn:
    """CPU stand-in for CUDA graphs: every replay reads and writes fixed memory."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.recording = False
        self.replayed = 0
        self.fails: Exception | None = None
        self.factor = 1.0

    def new_pool(self) -> list[Any]:
        """Return a pool, whose memory contains the last forward pass that used it."""
        return []

    def warm_up(self, work: Any) -> None:
        torch.rand(3)
        work()

    def synchronize(self) -> None:
        """Do nothing."""

    def recover(self, device: Any) -> None:
        """Do nothing."""

    def record(self, work: Any, pool: list[Any]) -> Any:
        call, is_forward = work.__self__, "forward" in work.__name__
        self.recorded.append(work.__name__)
        if self.fails is not None:
            raise self.fails

        def run() -> Any:
            if is_forward:
                pool[:] = [call]
            assert pool == [call], "a different pass wrote to this one's memory"
            with torch.enable_grad():
                return work()

        self.recording = True
        results = run()
        self.recording = False

        def replay() -> None:
            self.replayed += 1
            for place, value in zip(results or (), run() or (), strict=True):
                place.detach().copy_(value * self.factor)

        return replay, results


def make_model(kind: str = "bert", **options: Any) -> Any:
    torch.manual_seed(0)
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    names += ("classifier_dropout_prob", "seq_classif_dropout")
    sizes = {**SIZES, **dict.fromkeys(names, 0.0), "num_labels": 2, **options}
    if kind == "modernbert":
        sizes |= {"local_attention": 8, "global_attn_every_n_layers": 2}
        sizes |= {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    return transformers.AutoModelForSequenceClassification.from_config(config).train()


def make_batch(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return examples of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 60, (len(lengths), width), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths)) % 2}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_equal_gradients(ours: nn.Module, plain: nn.Module) -> None:
    found, expected = gradients(ours), gradients(plain)
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module, ModelGraphs]:
    """Return the model with graphs, a plain copy, and the graphs."""
    plain = copy.deepcopy(model)
    return model, plain, ModelGraphs(model, capture=StandIn())


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "albert", "electra", "mpnet", "deberta-v2", "modernbert", "ernie"]
)
def test_replayed_encoder_gradients_match_plain_encoder(kind: str) -> None:
    model, plain, graphs = pair(make_model(kind))
    with graphs.active():
        for batch in (make_batch(5, 9, 3), make_batch(20, 2, 17), make_batch(9, 9, 9, seed=1)):
            for one in (model, plain):
                one.zero_grad()
                one(**batch).loss.backward()
            assert_equal_gradients(model, plain)
    assert graphs.off is None
    assert graphs.captures == 2, "widths 16 and 32"
    assert "forward" not in vars(encoders_of(model)[0])


def test_gradients_accumulate_and_survive_later_replays() -> None:
    model, plain, graphs = pair(make_model())
    with graphs.active():
        kept: dict[str, Any] = {}
        for number, batch in enumerate([make_batch(5, 9), make_batch(20, 2), make_batch(9, 4, seed=1)]):
            for one in (model, plain):
                one(**batch).loss.backward()
            if number == 0:
                kept = {n: p.grad for n, p in model.named_parameters()}
                values = gradients(model)
                model.zero_grad(set_to_none=True)
                plain.zero_grad(set_to_none=True)
    assert_equal_gradients(model, plain)
    assert all(torch.equal(kept[n], g) for n, g in values.items() if g is not None)


def test_padding_dependent_outputs_get_no_extra_padding() -> None:
    """DeBERTa's outputs at padding depend on the width, and custom models may read them."""
    encoder = make_model("deberta-v2").deberta
    model, plain, graphs = pair(nn.ModuleDict({"encoder": encoder}))
    with graphs.active():
        for widths in ((5, 9), (5, 12)):
            batch = make_batch(*widths)
            batch.pop("labels")
            for one in (model, plain):
                one.zero_grad()
                one["encoder"](**batch).last_hidden_state.pow(2).sum().backward()
            assert_equal_gradients(model, plain)
    assert graphs.captures == 2
    assert graphs.off is None


class Siamese(nn.Module):
    """Two calls of one encoder before the backward pass; the pooler doesn't affect the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_model().bert

    def embed(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return (found.view(-1, 32).view(found.shape) * mask).sum(1) / mask.sum(1)

    def forward(self, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cosine_similarity(self.embed(one), self.embed(other)).mean()


def test_two_calls_before_backward_use_different_memory() -> None:
    model, plain, graphs = pair(Siamese())
    with graphs.active():
        for seed in range(3):
            one, other = make_batch(5, 9, seed=seed), make_batch(7, 3, seed=seed + 10)
            for side in (model, plain):
                side.zero_grad()
                side(one, other).backward()
            assert_equal_gradients(model, plain)
    (encoder,) = graphs._encoders
    assert len(encoder._slots) == 2
    assert plain.encoder.pooler.dense.weight.grad is None
    assert graphs.captures == 2


def test_r_drop_draws_two_masks_and_unused_loss_is_freed() -> None:
    model = make_model(hidden_dropout_prob=0.2)
    graphs, batch = ModelGraphs(model, capture=StandIn()), make_batch(5, 9)
    with graphs.active():
        for _ in range(3):
            one, two = model(**batch).logits, model(**batch).logits
            assert not torch.equal(one, two)
            functional.mse_loss(one, two).backward()
        for _ in range(5):
            one = model(**batch).loss  # never differentiated
        del one, two
        gc.collect()
        model(**batch).loss.backward()
    (encoder,) = graphs._encoders
    assert len(encoder._slots) == 2
    assert graphs.captures == 2


def test_more_pending_calls_than_slots_run_plain() -> None:
    model, plain, graphs = pair(make_model())
    with graphs.active():
        for one in (model, plain):
            sum(one(**make_batch(5, 9, seed=seed)).loss for seed in range(7)).backward()
    assert_equal_gradients(model, plain)
    assert graphs.captures == model_graphs.MOST_SLOTS


def test_backward_can_run_twice_until_the_next_forward_pass() -> None:
    model, plain, graphs = pair(make_model())
    batch = make_batch(5, 9)
    with graphs.active():
        for one in (model, plain):
            loss = one(**batch).loss
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
        assert_equal_gradients(model, plain)
        old = model(**batch).loss
        old.backward(retain_graph=True)
        model(**batch).loss.backward()
        with pytest.raises(RuntimeError, match="use_speed_ups = False"):
            old.backward()


@pytest.mark.parametrize("output", ["tuple", "hidden states", "both"])
def test_outputs_have_the_requested_form(output: str) -> None:
    model, plain, graphs = pair(make_model().bert)
    batch = make_batch(5, 9)
    del batch["labels"]
    options = {"return_dict": output == "hidden states", "output_hidden_states": output != "tuple"}
    with graphs.active():
        found, expected = model(**batch, **options), plain(**batch, **options)
        for one in (found, expected):
            last = one.hidden_states if output == "hidden states" else one[-1]
            sum(part.pow(2).mean() for part in (one[0], *last)).backward()
    assert type(found) is type(expected)
    torch.testing.assert_close(list(float_tensors(found)), list(float_tensors(expected)))
    assert_equal_gradients(model, plain)
    assert graphs.capture.replayed >= 2


def test_gradient_hooks_are_called_once() -> None:
    model, plain, graphs = pair(make_model())
    with graphs.active():
        for one in (model, plain):
            one.get_input_embeddings().weight.register_hook(lambda gradient: 2 * gradient)
            one(**make_batch(5, 9)).loss.backward()
    assert graphs.capture.replayed >= 2
    assert_equal_gradients(model, plain)


def test_copy_of_model_during_a_step_is_plain() -> None:
    model, plain, graphs = pair(make_model())
    with graphs.active():
        model(**make_batch(5, 9)).loss.backward()
        copied = copy.deepcopy(model)
        replayed = graphs.capture.replayed
        for one in (copied, plain):
            one.zero_grad()
            one(**make_batch(7, 3)).loss.backward()
    assert_equal_gradients(copied, plain)
    assert graphs.capture.replayed == replayed


def leaves_of(tensors: list[torch.Tensor]) -> set[torch.Tensor]:
    """Return the leaves that autograd's graph of these tensors reaches."""
    nodes, found = [t.grad_fn for t in tensors if t.grad_fn is not None], set()
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            found |= {node.variable} if hasattr(node, "variable") else set()
            nodes += [following for following, _ in node.next_functions if following is not None]
    return found


def test_captured_passes_do_not_reach_the_parameters_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter's autograd node that another pass keeps alive would join its stream to the capture."""
    model, _, graphs = pair(Siamese())
    reached: set[torch.Tensor] = set()
    own = model_graphs.CapturedCall._forward

    def forward(self: Any) -> Any:
        outputs = own(self)
        reached.update(leaves_of(self._live))
        return outputs

    monkeypatch.setattr(model_graphs.CapturedCall, "_forward", forward)
    with graphs.active():
        model(make_batch(5, 9), make_batch(7, 3)).backward()
    assert reached
    assert not reached & set(model.parameters())
    assert all(p.grad is not None for p in model.encoder.encoder.parameters())


def test_warm_up_uses_the_mask_that_a_capture_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers skips the mask of a batch without padding, but not while a CUDA graph is captured."""
    model, _, graphs = pair(make_model())
    masks, own = [], functional.scaled_dot_product_attention

    def attend(*args: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return own(*args, attn_mask=attn_mask, **options)

    def warm_up(work: Any) -> None:
        masks.clear()
        work()
        assert masks
        assert all(mask is not None for mask in masks)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(graphs.capture, "warm_up", warm_up)
    with graphs.active():
        model(**make_batch(16, 16)).loss.backward()
    assert graphs.captures == 1


@pytest.mark.parametrize(("kind", "method"), [("deberta-v2", "get_rel_pos"), ("mpnet", "relative_position_bucket")])
def test_distances_are_not_computed_during_a_capture(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copy values from the host, which a capture refuses."""
    options = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}
    model, plain, graphs = pair(make_model(kind, **(options if kind == "deberta-v2" else {})))
    encoder = type(encoders_of(model)[0].encoder)
    own = getattr(encoder, method)

    def compute(*args: Any, **given: Any) -> Any:
        assert not graphs.capture.recording
        return own(*args, **given)

    monkeypatch.setattr(encoder, method, staticmethod(compute) if kind == "mpnet" else compute)
    with graphs.active():
        for batch in (make_batch(5, 9), make_batch(30, 4)):
            for one in (model, plain):
                one.zero_grad()
                one(**batch).loss.backward()
            assert_equal_gradients(model, plain)
    assert graphs.off is None
    assert graphs.captures == 2


def test_gradients_of_input_embeddings_reach_the_caller() -> None:
    model, plain, graphs = pair(make_model())
    found = []
    with graphs.active():
        for one in (model, plain):
            embeddings = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
            one(inputs_embeds=embeddings, labels=torch.tensor([0, 1])).loss.backward()
            found.append(embeddings.grad)
    assert graphs.captures == 1
    torch.testing.assert_close(*found)


def test_frozen_layers_get_no_gradient_until_unfrozen() -> None:
    model = make_model()
    model.bert.embeddings.requires_grad_(False)
    model, plain, graphs = pair(model)
    with graphs.active():
        for frozen in (True, False):
            for one in (model, plain):
                one.bert.embeddings.requires_grad_(not frozen)
                one.zero_grad()
                one(**make_batch(5, 9)).loss.backward()
            assert_equal_gradients(model, plain)
    assert graphs.captures == 2


@pytest.mark.parametrize("restore", ["data =", "copy_"])
def test_weights_set_through_data_are_used_in_next_call(restore: str) -> None:
    model, plain, graphs = pair(make_model())
    with graphs.active():
        for seed in range(3):
            for one in (model, plain):
                one.zero_grad()
                weight, batch = one.get_input_embeddings().weight, make_batch(5, 9, seed=seed)
                one(**batch).loss.backward()
                before = weight.data.clone()  # FGM
                weight.data.add_(weight.grad / weight.grad.norm())
                one(**batch).loss.backward()
                if restore == "copy_":
                    weight.data.copy_(before)
                else:
                    weight.data = before
                one(**batch).loss.backward()
            assert_equal_gradients(model, plain)
    assert graphs.captures == 1


def test_dropout_differs_per_step_and_ignores_captures() -> None:
    def losses(graphs: ModelGraphs, model: Any) -> list[float]:
        torch.manual_seed(3)
        with graphs.active():
            return [
                float(model(**batch).loss.detach()) for batch in (make_batch(5, 9), make_batch(20, 9), make_batch(5, 9))
            ]

    model = make_model(hidden_dropout_prob=0.3)
    graphs = ModelGraphs(model, capture=StandIn())
    first = losses(graphs, model)
    assert first == losses(graphs, model), "captures and the comparison draw nothing"
    assert first[0] != first[2]
    graphs.free()
    assert first == losses(graphs, model)


def test_old_shapes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_graphs, "MOST_GRAPHS", 2)
    model = make_model()
    graphs = ModelGraphs(model, capture=StandIn())
    with graphs.active():
        for width in (9, 20, 9, 40, 9, 20):
            model(**make_batch(5, width)).loss.backward()
    assert graphs.captures == 4
    (encoder,) = graphs._encoders
    assert len(encoder._slots[0].graphs) == 2


def test_too_many_shapes_switch_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_graphs, "MOST_CAPTURES", 2)
    model, plain, graphs = pair(make_model())
    with graphs.active():
        for rows in range(1, 5):
            for one in (model, plain):
                one.zero_grad()
                one(**make_batch(*[7] * rows)).loss.backward()
            assert_equal_gradients(model, plain)
    assert graphs.off == "the batches have too many different shapes"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fails": RuntimeError("cudaErrorStreamCaptureUnsupported")}, "reads values back from the GPU"),
        ({"fails": torch.OutOfMemoryError("CUDA out of memory")}, "out of memory"),
        ({"factor": 1.01}, "returns different results"),
    ],
)
def test_failed_or_different_capture_leaves_plain_model(change: dict[str, Any], reason: str) -> None:
    model, plain, graphs = pair(make_model())
    vars(graphs.capture).update(change)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with graphs.active():
        for one in (model, plain):
            one(**make_batch(5, 9)).loss.backward()
    assert_equal_gradients(model, plain)
    assert reason in str(graphs.off)
    assert torch.equal(torch.get_rng_state(), state)


def test_failed_later_capture_keeps_current_pass() -> None:
    model, plain, graphs = pair(make_model())
    with graphs.active():
        model(**make_batch(5, 9)).loss.backward()
        model.zero_grad()
        one = model(**make_batch(5, 9)).loss
        graphs.capture.fails = RuntimeError("no")
        (one + model(**make_batch(5, 30)).loss).backward()
        (plain(**make_batch(5, 9)).loss + plain(**make_batch(5, 30)).loss).backward()
    assert_equal_gradients(model, plain)
    assert graphs.off == "no"


SKIPPED = {
    "eval": None, "no_grad": None, "hook": "hooks listen to BertModel", "attentions": "they pass output_attentions to BertModel",
    "forward": "forward of BertModel was replaced", "4-D mask": "they don't pass rows of tokens on the GPU",
}  # fmt: skip


@pytest.mark.parametrize("how", list(SKIPPED))
def test_calls_that_cannot_be_replayed_run_plain(how: str) -> None:
    model, plain, graphs = pair(make_model())
    batch = make_batch(5, 9)
    for one in (model, plain):
        if how == "eval":
            one.eval()
        if how == "hook":
            one.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
        if how == "attentions":
            one.set_attn_implementation("eager")
            batch["output_attentions"] = True
        if how == "4-D mask":
            batch["attention_mask"] = torch.ones(2, 1, 1, 9)
        if how == "forward":
            own = one.bert.forward
            one.bert.forward = lambda *args, own=own, **kwargs: own(*args, **kwargs)
    with graphs.active(), torch.set_grad_enabled(how != "no_grad"):
        found, expected = model(**batch), plain(**batch)
    torch.testing.assert_close(found.logits, expected.logits)
    assert graphs.capture.replayed == 0
    assert graphs.off is None
    assert graphs.skipped == SKIPPED[how]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2), "no encoder of transformers"),
        (lambda: checkpointed(make_model()), "gradient checkpointing"),
        (lambda: make_model(is_decoder=True), "decoder"),
        (lambda: with_own_layer(make_model()), "not the module of transformers"),
    ],
)
def test_uncaptured_models_report_the_reason(make: Any, reason: str) -> None:
    assert reason in str(ModelGraphs(make(), capture=StandIn()).off)


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def with_own_layer(model: Any) -> Any:
    class Linear(nn.Linear):
        pass

    model.bert.encoder.layer[0].output.dense.__class__ = Linear
    return model


def test_captured_autocast_gradients_match_plain_autocast() -> None:
    model, plain, graphs = pair(make_model())
    with graphs.active():
        for one in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(**make_batch(5, 9)).loss
            loss.backward()
    found, expected = gradients(model), gradients(plain)
    assert graphs.captures == 1
    assert all(torch.allclose(found[n], g, atol=2e-2) for n, g in expected.items() if g is not None)  # type: ignore[arg-type]


# ---- Trainer ----


class Weighted(Trainer):
    """A script with class weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0]))
        return (loss, outputs) if return_outputs else loss


class PlainWeighted(Weighted):
    use_speed_ups = False


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def train(kind: Any, folder: Path, model: Any, resume: Any = None, **options: Any) -> Any:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(5, 60, rng.integers(4, 40)).tolist(), "labels": i % 2} for i in range(48)]
    given = {
        "max_steps": 10,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 4,
        "bf16": False,
        "logging_steps": 1,
        **options,
    }
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )
    transformers.set_seed(0)
    trainer = kind(model, args, train_dataset=rows, eval_dataset=rows[:8], data_collator=collate)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(Trainer, "_on_gpu", True)
    monkeypatch.setattr(model_graphs, "CudaCapture", lambda: found)
    return found


@pytest.mark.trains
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}], ids=["one", "accumulation"])
def test_trainer_with_own_loss_replays_the_encoder(tmp_path: Path, stand_in: StandIn, options: dict[str, Any]) -> None:
    ours = train(Weighted, tmp_path / "ours", make_model(), **options)
    plain = train(PlainWeighted, tmp_path / "plain", make_model(), **options)
    assert stand_in.replayed >= 20
    logs = [
        [line[n] for line in t.state.log_history for n in ("loss", "eval_loss") if n in line] for t in (ours, plain)
    ]
    np.testing.assert_allclose(*logs, atol=1e-5)
    assert (tmp_path / "ours" / "journal.jsonl").read_text().count("Speedups: CUDA graph of the encoder.") == 1


@pytest.mark.trains
@pytest.mark.parametrize(
    "name",
    [
        "accumulation 2", "compute_loss_func", "label smoothing", "lower half frozen", "custom model class", "torch dataset",
        "adafactor", "LoRA", "FGM", "R-Drop", "distillation", "siamese", "layer-wise learning rates", "token classification",
    ],
)  # fmt: skip
def test_benchmark_script_losses_match_transformers(
    name: str, tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import scripts_gpu

    config, rows = scripts_gpu.tiny()
    given = {"max_steps": 4, "use_cpu": True, "logging_steps": 1, "per_device_train_batch_size": 4, "bf16": False}
    logs = []
    for base in (Trainer, transformers.Trainer):
        trainer = scripts_gpu.make_trainer(
            name, base, tmp_path / base.__module__, config, rows, scripts_gpu.pad, **given
        )
        trainer.train()
        logs.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert logs[0] == pytest.approx(logs[1], abs=2e-5)
    assert stand_in.replayed >= 8


@pytest.mark.trains
def test_trainer_resumes_bit_identically(tmp_path: Path, stand_in: StandIn) -> None:
    options = {"save_strategy": "steps", "save_steps": 6}
    one = train(Weighted, tmp_path / "one", make_model(hidden_dropout_prob=0.2), **options)
    again = train(
        Weighted, tmp_path / "again", make_model(hidden_dropout_prob=0.2), tmp_path / "one" / "checkpoint-6", **options
    )
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), again.model.parameters(), strict=True))


@pytest.mark.trains
def test_trainer_reports_a_failed_capture_once(tmp_path: Path, stand_in: StandIn) -> None:
    stand_in.fails = RuntimeError("broken")
    ours = train(Weighted, tmp_path, make_model())
    lines = (tmp_path / "journal.jsonl").read_text()
    assert lines.count("CUDA graph of the encoder is off because") == 1
    assert stand_in.replayed == 0
    assert math.isfinite(ours.state.log_history[-1]["train_loss"])


@pytest.mark.trains
def test_trainer_reports_calls_without_graphs_once(tmp_path: Path, stand_in: StandIn) -> None:
    class Attentions(Weighted):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return super().compute_loss(model, {**inputs, "output_attentions": True}, *args, **options)

    model = make_model()
    model.set_attn_implementation("eager")
    train(Attentions, tmp_path, model)
    lines = (tmp_path / "journal.jsonl").read_text()
    assert lines.count("Some calls run without it because they pass output_attentions to BertModel.") == 1


@pytest.mark.trains
def test_nan_on_a_gpu_stops_the_run_with_finite_weights(tmp_path: Path, stand_in: StandIn) -> None:
    class Breaks(Weighted):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            found = super().compute_loss(model, inputs, *args, **options)
            return found * math.nan if self.state.global_step == 4 else found

    model = make_model()
    with pytest.raises(NumericsError, match=r"step 5: .*training rows \d+, \d+, \d+, \d+"):
        train(Breaks, tmp_path, model, logging_steps=100, eval_strategy="no")
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    steps = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in steps if line["event"] == "StepDone"] == [False] * 4 + [True]


class InFp16(Weighted):
    """A script with the gradient scaler of fp16, whose gradients and losses are NaN or infinite in some steps."""

    scale, infinite_gradients, nan_losses = 2.0**16, (), ()

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        return super()._prepare_for_training(*args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.state.global_step in self.infinite_gradients:
            model.classifier.weight.grad.fill_(math.inf)
        self.accelerator.scaler.unscale_(self._plain_optimizer())
        return super()._clip_grad_norm(model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **options)
        return found * math.nan if self.state.global_step in self.nan_losses else found


@pytest.mark.trains
@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"infinite_gradients": (3, 4)}, None),
        ({"infinite_gradients": (3,), "scale": 2.0**-10}, 4),
        ({"nan_losses": (5,)}, 6),
    ],
)
def test_fp16_run_stops_unless_the_scale_overflows(
    options: dict[str, Any], stops: int | None, tmp_path: Path, stand_in: StandIn
) -> None:
    kind = type("Fp16", (InFp16,), options)
    given = {"logging_steps": 100, "eval_strategy": "no"}
    model = make_model()
    if stops is None:
        trainer = train(kind, tmp_path, model, **given)
        assert (trainer.state.global_step, trainer.accelerator.scaler.get_scale()) == (10, 2.0**14)
    else:
        with pytest.raises(NumericsError, match=f"step {stops}: "):
            train(kind, tmp_path, model, **given)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.trains
def test_own_training_step_has_the_same_event_log(tmp_path: Path, stand_in: StandIn) -> None:
    class Own(Weighted):
        def training_step(self, model: Any, inputs: Any, *_: Any) -> torch.Tensor:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    losses = []
    for kind in (Own, type("Plain", (Own,), {"use_speed_ups": False})):
        train(kind, tmp_path / kind.__name__, make_model(), logging_steps=3, eval_strategy="no")
        lines = (tmp_path / kind.__name__ / "journal.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if '"StepDone"' in line])
    assert len(losses[0]) == 10
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.trains
def test_event_log_has_losses_of_steps_that_were_read_late(tmp_path: Path, stand_in: StandIn) -> None:
    logs = []
    for every in (1, 100):
        folder = tmp_path / str(every)
        train(Weighted, folder, make_model(), logging_steps=every)
        lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        logs.append([line["loss"] for line in lines if line["event"] == "StepDone"])
    assert len(logs[0]) == 10
    assert logs[0] == logs[1]


@pytest.mark.parametrize("number", [0.5, -3, True, torch.finfo(torch.float32).min])
def test_number_written_on_the_device_is_the_same(number: Any) -> None:
    expected = [torch.tensor(number, device="cpu"), torch.tensor(number, device="cpu", dtype=torch.float64)]
    with model_graphs.NumbersOnDevice():
        found = [torch.tensor(number, device="cpu"), torch.tensor(number, device="cpu", dtype=torch.float64)]
        assert torch.equal(torch.tensor([1, 2], device="cpu"), torch.tensor([1, 2]))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
