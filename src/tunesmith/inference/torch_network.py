"""A model folder as a torch module, with the speedups that apply to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.batches import Collate, TokenRows, padding_of
from tunesmith.data.tokenize import LongTexts, TokenEncoder, longest_allowed, make_token_encoder
from tunesmith.errors import ConfigError
from tunesmith.inference.model_folder import ModelFacts
from tunesmith.models.files import load_tokenizer, position_limit, require_segments
from tunesmith.models.load import load_model, read_model_config
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import Precision, Runtime, make_runtime
from tunesmith.training.evaluation import predict_rows


@dataclass
class TorchNetwork:
    """A torch module with its tokenizer and batching."""

    model: Any
    tokenizer: Any
    runtime: Runtime
    collate: Collate
    max_length: int
    long_texts: LongTexts = "head"
    rendered: bool = False

    def __post_init__(self) -> None:
        self.name = f"torch on {self.runtime.device.type}"
        self.has_types = "token_type_ids" in self.tokenizer.model_input_names
        count = self.tokenizer.num_special_tokens_to_add
        self.encoder: TokenEncoder = make_token_encoder(
            self.tokenizer, self.max_length, self.long_texts, rendered=self.rendered
        )
        self.special = (int(count()), int(count(pair=True)))

    @property
    def vocab_size(self) -> int:
        """Number of token embeddings."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def logits(
        self, rows: TokenRows, *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the logits of each row, in input order. The batch size depends on the device unless `max_rows` is set."""
        tokens = None if max_rows is None else 64 * max_rows
        result = predict_rows(
            self.model, rows, self.collate, self.runtime, max_rows=max_rows, max_tokens=tokens, on_batch=on_batch
        )
        return result.logits

    def require_segments(self, text_columns: int) -> None:
        """Raise a ConfigError if the model doesn't support this many texts per row."""
        require_segments(self.tokenizer, vars(self.model.config), pair=text_columns == 2, where=self.model.name_or_path)


def load_torch_network(folder: Path, facts: ModelFacts, *, use_cpu: bool, precision: Precision) -> TorchNetwork:
    """Load the model of a verified folder onto the device."""
    config = read_model_config(folder)
    tokenizer = load_tokenizer(folder)
    runtime = make_runtime(precision=precision, use_cpu=use_cpu)
    loaded = load_model(folder, facts.labels, device=runtime.device)
    if loaded.notes:
        raise ConfigError(f"is not a trained classifier ({loaded.notes[0]})", where=str(folder), fix="Train it first.")
    model = loaded.model.eval()
    speedups = apply_speedups(
        model, None, padding_of(tokenizer), device=runtime.device, precision=precision, cuda_graphs="off"
    )
    longest = longest_allowed(tokenizer, model_max=position_limit(config), asked=facts.max_length)
    how = (facts.long_texts, facts.rendered)
    return TorchNetwork(model, tokenizer, runtime, speedups.collate, longest, *how)
