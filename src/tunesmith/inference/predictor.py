"""A trained folder as a function from texts to labels, always in input order. Imports no torch: a graph needs none.

Texts become logits chunk by chunk: a thread tokenizes the next chunk while the model works on this one. No token file is written,
and memory holds the tokens of a few chunks however long the input is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tunesmith.data.tokenize import (
    ChunkEncoder,
    CutCount,
    EncodedRow,
    TokenEncoder,
    TruncationCount,
    make_token_rows,
    require_text_cells,
)
from tunesmith.data.tokens import TokenRows, prefetched
from tunesmith.errors import ConfigError, DataError, ResourceError, first_few, name_the_extra
from tunesmith.inference.facts import ModelFacts, is_graph_folder, model_folder_of, read_facts, read_graph_facts
from tunesmith.inference.given_texts import given_columns
from tunesmith.inference.tables import predicted_names, probabilities_of, require_numbers
from tunesmith.labels import Task
from tunesmith.models.model_files import Seal, read_config_file
from tunesmith.runs.manifest import MANIFEST

if TYPE_CHECKING:
    from tunesmith.training.distributed import Precision

SHOWN_LABELS = 6
log = logging.getLogger(__name__)


class Network(Protocol):
    """A loaded model: a torch module, or an exported graph."""

    name: str
    """The library and the device: "torch on cpu", "onnxruntime on cpu"."""
    encoder: TokenEncoder
    chunks: ChunkEncoder
    """The same encoder for many rows at once."""
    has_types: bool
    """Whether the model is given token type ids."""
    max_length: int
    special: tuple[int, int]
    """Special tokens of a row with one text, and with two."""

    @property
    def vocab_size(self) -> int:
        """Number of token embeddings."""

    def answer(
        self, rows: TokenRows, *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Logits of each row, in input order; in batches of the size that suits the device, or of `max_rows` rows."""

    def require_segments(self, text_columns: int) -> None:
        """A ConfigError when the model cannot take so many texts a row."""


CHUNK_ROWS = 8192
"""Rows sorted by length together. On the long tail of bench/predict_speed.py more changed nothing: packed batches have
no padding, and a chunk still fills some ten batches of a GPU."""

Chunk = Sequence[list[str]]
"""One list of texts for each text column."""


@dataclass(frozen=True)
class TextPredictions:
    """`logits[i]` belongs to text i; `truncated` says what was cut."""

    logits: npt.NDArray[np.float32]
    truncated: TruncationCount
    empty: tuple[int, ...] = ()
    """Rows of which the model saw special tokens alone."""


def predict_chunks(
    predict: Callable[[TokenRows], npt.NDArray[np.float32]],
    encode: Callable[[Chunk], tuple[TokenRows, CutCount]],
    chunks: Iterator[Chunk],
    *,
    max_length: int,
    vocab_size: int,
    special: tuple[int, int] = (0, 0),
) -> TextPredictions:
    """Logits of all texts, in input order. `special`: the special tokens of a row with one text, and with two."""
    logits: list[npt.NDArray[np.float32]] = []
    rows = sides = 0
    cut = CutCount()
    empty: list[int] = []

    def prepare(chunk: Chunk) -> tuple[int, TokenRows, CutCount]:
        return len(chunk), *encode(chunk)

    for sides, tokens, cuts in prefetched(_checked(chunks), prepare, ahead=1):
        logits.append(answer_tokens(predict, tokens, vocab_size=vocab_size, before=rows))
        empty += (rows + np.flatnonzero(tokens.lengths <= special[sides - 1])).tolist()
        rows += len(tokens)
        cut += cuts
    found = np.concatenate(logits) if logits else np.zeros((0, 0), dtype=np.float32)
    return TextPredictions(found, cut.in_split(rows, sides, max_length), tuple(empty))


def answer_tokens(
    predict: Callable[[TokenRows], npt.NDArray[np.float32]], tokens: TokenRows, *, vocab_size: int, before: int = 0
) -> npt.NDArray[np.float32]:
    """Logits of the rows, all finite. Refuses token ids that the model does not have. `before`: rows before these, for errors."""
    highest = int(max((values.max(initial=0) for values, _ in tokens.columns["input_ids"].chunks), default=0))
    if highest >= vocab_size:
        problem = f"the tokenizer makes token id {highest}, but the model has only {vocab_size} token embeddings"
        raise DataError(problem, fix="Use the tokenizer that belongs to the model.")
    logits = predict(tokens)
    require_numbers(logits, before=before)
    return logits


def chunks_of(columns: Sequence[Sequence[str]]) -> Iterator[Chunk]:
    """Columns that are in memory already, in chunks."""
    for start in range(0, len(columns[0]), CHUNK_ROWS):
        yield [list(column[start : start + CHUNK_ROWS]) for column in columns]


def chunks_of_dataset(dataset: Any, names: Sequence[str]) -> Iterator[Chunk]:
    """The text columns of a Dataset, in chunks."""
    some = dataset.select_columns(list(names))
    for start in range(0, len(some), CHUNK_ROWS):
        part = some[start : start + CHUNK_ROWS]
        yield [part[name] for name in names]


def _checked(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    before = 0
    for chunk in chunks:
        for column in chunk:
            require_text_cells(column, before)
        before += len(chunk[0])
        yield chunk


def _load_graph(seal: Seal, threads: int | None) -> tuple[Network, ModelFacts]:
    from tunesmith.inference.graph_network import load_graph_network

    if not seal.sealed:
        log.warning("%s has no %s: its files are used as they are, unverified", seal.folder, MANIFEST)
    facts = read_facts(seal.folder, read_config_file(seal.folder))
    graph = read_graph_facts(seal.folder)
    network = load_graph_network(seal.folder, graph, threads=threads, long_texts=facts.long_texts)
    seal.require_unchanged()
    return network, facts


@dataclass(frozen=True, repr=False)
class Predictor:
    """`predict(texts)` gives label names, `predict_proba(texts)` a table, `probabilities(texts)` an array."""

    network: Network
    facts: ModelFacts
    folder: Path

    @classmethod
    def load(
        cls, path: str | Path, *, use_cpu: bool = False, precision: Precision = "no", threads: int | None = None
    ) -> Predictor:
        """The model of a run folder, of an exported folder, or of any model folder with a classification head.

        `threads`: of the CPU, for torch in the whole process; default: as they are. For a model on a GPU, all but two of
        them (of OMP_NUM_THREADS, or of the cores) are processes that tokenize, started by the first call with many rows.
        """
        seal = model_folder_of(path)
        graph = is_graph_folder(seal.folder)
        try:
            if graph:
                return cls(*_load_graph(seal, threads), Path(path))
            from tunesmith.inference.torch_network import load_torch_network
        except ModuleNotFoundError as error:
            name_the_extra(error, str(seal.folder), "" if graph else ", or export the model (`tunesmith export`).")
            raise
        network, facts = load_torch_network(seal, use_cpu=use_cpu, precision=precision, threads=threads)
        return cls(network, facts, Path(path))

    def __repr__(self) -> str:
        labels = self.facts.labels
        names = first_few(labels.names, SHOWN_LABELS)
        reads = " + ".join(self.facts.text_columns or ("text",))
        text = f"Predictor({self.folder}: {reads} -> {labels.task.value} ({names}), {self.network.name})"
        return " ".join(text.split())

    def predict(self, texts: Any, pairs: Any = None) -> list[Any]:
        """The label name of each text (a list of names for multilabel, a number for regression). A string is one text."""
        return predicted_names(self.probabilities(texts, pairs), self.facts.labels)

    def predict_proba(self, texts: Any, pairs: Any = None) -> Any:
        """A DataFrame with a row for each text and a column for each label name; it keeps the index of a Series or frame."""
        labels = self.facts.labels
        if labels.task is Task.REGRESSION:
            raise ConfigError("a regression model gives a number, not probabilities", fix="Use predict(texts).")
        try:
            import pandas as pd
        except ModuleNotFoundError:
            problem = "predict_proba gives a pandas DataFrame, and pandas is not installed"
            fix = "Use probabilities(texts), an array with a column for each of facts.labels.names."
            raise ResourceError(problem, fix=fix) from None
        index = texts.index if isinstance(texts, (pd.Series, pd.DataFrame)) else None
        return pd.DataFrame(self.probabilities(texts, pairs), columns=list(labels.names), index=index)

    def probabilities(self, texts: Any, pairs: Any = None) -> npt.NDArray[np.float64]:
        """One row of probabilities for each text or pair; the value itself for a regression."""
        return probabilities_of(self.logits(texts, pairs), self.facts.labels.task)

    def logits(self, texts: Any, pairs: Any = None) -> npt.NDArray[np.float32]:
        """The raw scores of each text or pair."""
        columns = given_columns(texts, pairs, self.facts.text_columns)
        if not columns[0]:
            return np.zeros((0, len(self.facts.labels)), dtype=np.float32)
        return self.predict_texts(chunks_of(columns)).logits

    def predict_texts(
        self, chunks: Iterator[Chunk], *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> TextPredictions:
        """Logits of each text of the chunks, in input order; the next chunk is tokenized meanwhile."""
        network = self.network
        return predict_chunks(
            partial(network.answer, max_rows=max_rows, on_batch=on_batch),
            network.chunks.encode,
            map(self._with_known_segments, chunks),
            max_length=network.max_length,
            vocab_size=network.vocab_size,
            special=network.special,
        )

    def encode_rows(self, columns: Chunk) -> list[EncodedRow]:
        """The tokens of each row of one or two columns of texts, for `logits_of`."""
        return self.network.encoder.encode(self._with_known_segments(columns))

    def logits_of(self, rows: Sequence[EncodedRow]) -> npt.NDArray[np.float32]:
        """The raw scores of encoded rows, in their order."""
        tokens = make_token_rows(rows, has_types=self.network.has_types)
        return answer_tokens(self.network.answer, tokens, vocab_size=self.network.vocab_size)

    def _with_known_segments(self, chunk: Chunk) -> Chunk:
        self.network.require_segments(len(chunk))
        return chunk
