"""What a step does on the host: a captured one is given the answers of a rehearsal, and says when they are not its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from tunesmith.fast.host_watch import HostWatch, NotRepeatable

CPU = torch.device("cpu")
LABELS = torch.tensor([0, 1, 1, 0])


class OnOneDevice(HostWatch):
    """Here the model is on the host itself: a single number that is drawn stands for a draw on the host."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 0


def bart(**options: Any) -> torch.nn.Module:
    """Its head reads values and takes rows by a mask, its layers are left out at random."""
    torch.manual_seed(0)
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    ids = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2}
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, dropout=0.0, max_position_embeddings=32, num_labels=2, **sizes, **ids, **options
    )
    return transformers.BartForSequenceClassification(config).train()


def rows(seed: int, ends: int = 1) -> torch.Tensor:
    """Four rows with so many ends of a sentence."""
    ids = torch.randint(5, 60, (4, 12), generator=torch.Generator().manual_seed(seed))
    ids[:, -ends:] = 2
    return ids


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = functional.cross_entropy(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, LABELS)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_step_with_the_answers_of_another_has_its_own_gradients() -> None:
    model = bart()
    expected = gradients(model, rows(1)), gradients(model, rows(2))
    with OnOneDevice(CPU) as first:
        rehearsed = gradients(model, rows(1))
    assert first.rehearsal.why_not is None
    with OnOneDevice(CPU, first.rehearsal) as second:
        answered = gradients(model, rows(2))
    assert torch.equal(rehearsed, expected[0])
    assert torch.equal(answered, expected[1])
    assert second.differs
    assert not torch.stack(second.differs).any()


def test_a_step_that_would_read_other_values_differs() -> None:
    model = bart()
    with OnOneDevice(CPU) as first:
        gradients(model, rows(1))
    with OnOneDevice(CPU, first.rehearsal) as second:
        gradients(model, rows(1, ends=2))
    assert torch.stack(second.differs).any()


def test_layers_that_are_left_out_at_random_cannot_be_repeated() -> None:
    model = bart(encoder_layerdrop=0.5)
    with OnOneDevice(CPU) as first:
        gradients(model, rows(1))
    assert first.rehearsal.why_not == "the step draws random numbers on the host"
    with pytest.raises(NotRepeatable, match="draws random numbers"), OnOneDevice(CPU, first.rehearsal):
        gradients(model, rows(1))


@pytest.mark.parametrize(
    ("use", "decides"),
    [
        (lambda drawn: drawn < 0.0, False),
        (lambda drawn: drawn >= 1.0, False),
        (lambda drawn: drawn > 1, False),
        (lambda drawn: drawn < 1e-9, True),
        (lambda drawn: drawn <= 0, True),
        (lambda drawn: drawn > 0, True),
        (lambda drawn: drawn * 0, True),
        (lambda drawn: drawn.item(), True),
        (lambda drawn: None, False),
    ],
)
def test_a_draw_decides_nothing_where_no_value_of_it_would(use: Callable[[torch.Tensor], Any], decides: bool) -> None:
    with OnOneDevice(CPU) as watch:
        use(torch.rand([]))
    assert (watch.rehearsal.why_not is not None) == decides


def test_a_step_that_does_something_else_than_the_rehearsal_is_refused() -> None:
    with OnOneDevice(CPU) as first:
        torch.arange(3).nonzero()
    with pytest.raises(NotRepeatable, match="what it did before"), OnOneDevice(CPU, first.rehearsal):
        torch.arange(3)[torch.tensor([True, False, True])]


def test_what_is_copied_from_the_host_must_have_the_same_values_again() -> None:
    elsewhere = torch.device("meta")

    def step(values: torch.Tensor) -> torch.Tensor:
        return values.to(elsewhere)

    with HostWatch(elsewhere) as first:
        step(torch.arange(3))
    with HostWatch(elsewhere, first.rehearsal):
        assert step(torch.arange(3)).shape == (3,)
    for values in (torch.arange(3) + 1, torch.arange(4)):
        with pytest.raises(NotRepeatable, match="other values"), HostWatch(elsewhere, first.rehearsal):
            step(values)


def test_the_batch_that_a_step_is_given_is_not_its_own_copy() -> None:
    elsewhere, batch = torch.device("meta"), torch.arange(3)
    with HostWatch(elsewhere, given=[batch]) as watch:
        batch.to(elsewhere)
    assert watch.rehearsal.is_plain


def test_what_is_asked_outside_of_captures_alone_needs_no_answer() -> None:
    """As transformers looks whether a mask is all ones, but not while a step is captured."""
    values = torch.arange(4)

    def step(captured: bool) -> torch.Tensor:
        if not captured:
            values.nonzero()
        return values[values > 1]

    with OnOneDevice(CPU) as first:
        step(captured=False)
    with OnOneDevice(CPU, first.rehearsal) as second:
        assert step(captured=True).tolist() == [2, 3]
    assert not torch.stack(second.differs).any()
