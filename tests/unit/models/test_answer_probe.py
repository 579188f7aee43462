"""One short row through a model as soon as it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tunesmith.errors import NumericsError
from tunesmith.models.load import require_answer


class Characters(torch.nn.Module):
    """Like CANINE: no table of tokens to ask for."""

    base_model: Any = None

    def get_input_embeddings(self) -> Any:
        raise NotImplementedError


class Broken(torch.nn.Module):
    """Answers with NaN."""

    base_model: Any = None

    class config:
        num_labels = 2

    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(9, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return type("Output", (), {"logits": torch.full((1, 2), float("nan"))})


def test_a_model_of_characters_is_not_asked(tmp_path: Path) -> None:
    require_answer(Characters(), tmp_path)


def test_an_answer_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="not a number"):
        require_answer(Broken(), tmp_path)
