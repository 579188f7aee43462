"""A trained folder as a function from texts to probabilities, always in input order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.batches import Collate, Padding
from tunesmith.data.token_encoder import Encoder, make_encoder
from tunesmith.data.token_rows import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.labels import LabelMap, Task, is_chosen
from tunesmith.model.load import load_model, read_model_config
from tunesmith.model.tokenizer import load_tokenizer, position_limit, require_segments
from tunesmith.predict.facts import ModelFacts, model_folder_of, read_facts
from tunesmith.predict.packed_products import pack_products
from tunesmith.predict.stream import Chunk, TextPredictions, chunks_of, predict_chunks, require_numbers
from tunesmith.run.sealed import MANIFEST
from tunesmith.train.evaluate import predict_rows
from tunesmith.train.runtime import Precision, Runtime, make_runtime
from tunesmith.train.strategies import choose_strategies

log = logging.getLogger(__name__)


def probabilities_of(logits: npt.NDArray[Any], task: Task) -> npt.NDArray[np.float64]:
    """Softmax over classes, a sigmoid for each label of a multilabel task, the value itself for regression."""
    values = np.asarray(logits, dtype=np.float64)
    if task is Task.REGRESSION:
        return values
    if task is Task.MULTILABEL:
        return np.where(values >= 0, 1 / (1 + np.exp(-np.abs(values))), 1 - 1 / (1 + np.exp(-np.abs(values))))
    shifted = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def predicted_names(probabilities: npt.NDArray[Any], labels: LabelMap) -> list[Any]:
    """The predicted label name of each row; a list of names for multilabel, a number for regression."""
    require_numbers(probabilities)
    if labels.task is Task.REGRESSION:
        return [float(v) for v in probabilities.reshape(len(probabilities), -1)[:, 0]]
    if labels.task is Task.MULTILABEL:
        return [[labels.names[i] for i in np.flatnonzero(is_chosen(row))] for row in probabilities]
    return [labels.names[i] for i in probabilities.argmax(axis=-1)]


@dataclass
class Predictor:
    """`predict(rows)` for tokenized rows, `probabilities(texts)` for plain texts or pairs."""

    model: Any
    tokenizer: Any
    facts: ModelFacts
    runtime: Runtime
    collate: Collate
    max_length: int

    @classmethod
    def load(cls, path: str | Path, *, use_cpu: bool = False, precision: Precision = "no") -> Predictor:
        """The model of a run folder or of any model folder with a classification head."""
        from tunesmith.data.tokenize import longest_allowed

        seal = model_folder_of(path)
        folder = seal.folder
        if not seal.sealed:
            log.warning("%s has no %s: its files are used as they are, unverified", folder, MANIFEST)
        config = read_model_config(folder)
        facts = read_facts(folder, config)
        tokenizer = load_tokenizer(folder)
        loaded = load_model(folder, facts.labels)
        seal.require_unchanged()
        if loaded.notes:
            raise ConfigError(
                f"is not a trained classifier ({loaded.notes[0]})", where=str(folder), fix="Train it first."
            )
        runtime = make_runtime(precision=precision, use_cpu=use_cpu)
        model = loaded.model.to(runtime.device).eval()
        strategies = choose_strategies(
            model, None, padding_of(tokenizer), device=runtime.device, precision=precision, cuda_graphs="off"
        )
        if runtime.device.type == "cpu" and precision == "no":
            pack_products(model)
        longest = longest_allowed(tokenizer, model_max=position_limit(config), asked=facts.max_length)
        return cls(model, tokenizer, facts, runtime, strategies.collate, longest)

    @cached_property
    def encoder(self) -> Encoder:
        """Texts to tokens, cut at `max_length`."""
        return make_encoder(self.tokenizer, self.max_length)

    def predict(
        self, rows: TokenRows, *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Logits of each row, in input order; in batches of the size that suits the device, or of `max_rows` rows."""
        logits = self._answer(rows, max_rows=max_rows, on_batch=on_batch)
        require_numbers(logits)
        return logits

    def _answer(
        self, rows: TokenRows, *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        tokens = None if max_rows is None else 64 * max_rows
        result = predict_rows(
            self.model, rows, self.collate, self.runtime, max_rows=max_rows, max_tokens=tokens, on_batch=on_batch
        )
        return result.logits

    def predict_texts(
        self, chunks: Iterator[Chunk], *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> TextPredictions:
        """Logits of each text of the chunks, in input order; the next chunk is tokenized meanwhile."""
        return predict_chunks(
            partial(self._answer, max_rows=max_rows, on_batch=on_batch),
            self.encoder,
            map(self._with_known_segments, chunks),
            has_types="token_type_ids" in self.tokenizer.model_input_names,
            max_length=self.max_length,
            vocab_size=self.model.get_input_embeddings().num_embeddings,
            special=(self.tokenizer.num_special_tokens_to_add(), self.tokenizer.num_special_tokens_to_add(pair=True)),
        )

    def require_segments(self, text_columns: int) -> None:
        """A ConfigError when the model cannot take so many texts a row."""
        require_segments(self.tokenizer, vars(self.model.config), pair=text_columns == 2, where=self.model.name_or_path)

    def _with_known_segments(self, chunk: Chunk) -> Chunk:
        self.require_segments(len(chunk))
        return chunk

    def probabilities(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> npt.NDArray[np.float64]:
        """One row of probabilities for each text (or pair of texts)."""
        if not texts:
            return np.zeros((0, len(self.facts.labels)))
        columns = [texts] if pairs is None else [texts, pairs]
        logits = self.predict_texts(chunks_of(columns)).logits
        return probabilities_of(logits, self.facts.labels.task)


def padding_of(tokenizer: Any, *, multiple_of: int | None = None, fixed_length: int | None = None) -> Padding:
    """Padding as the tokenizer pads."""
    return Padding(
        int(tokenizer.pad_token_id),
        int(getattr(tokenizer, "pad_token_type_id", 0) or 0),
        str(getattr(tokenizer, "padding_side", "right")),
        multiple_of,
        fixed_length,
    )
