"""A trained folder as a function from texts to labels, always in input order. Imports no torch: a graph needs none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunesmith.encoder.config_file import read_config_file
from tunesmith.encoder.model_files import Seal
from tunesmith.errors import ConfigError, ResourceError, name_the_extra
from tunesmith.labels import LabelMap, Task, choose_labels
from tunesmith.predict.facts import ModelFacts, model_folder_of, read_facts
from tunesmith.predict.given_texts import given_columns
from tunesmith.predict.graph_facts import is_graph_folder, read_graph_facts
from tunesmith.predict.stream import (
    Chunk,
    Network,
    TextPredictions,
    answer_tokens,
    chunks_of,
    predict_chunks,
    require_numbers,
)
from tunesmith.run.sealed import MANIFEST
from tunesmith.tokens.encoding_processes import make_token_rows
from tunesmith.tokens.truncation import EncodedRow

if TYPE_CHECKING:
    from tunesmith.ranks.runtime import Precision

SHOWN_LABELS = 6
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
        return [float(v) for v in probabilities.ravel()]
    chosen = choose_labels(probabilities, labels.task, labels.thresholds)
    if labels.task is Task.MULTILABEL:
        return [[labels.names[i] for i in np.flatnonzero(row)] for row in chosen]
    return [labels.names[i] for i in chosen]


def sorted_scores(row: npt.NDArray[Any], labels: LabelMap, top_k: int | None = None) -> list[tuple[str, float]]:
    """(label name, probability), the most probable first; at most `top_k`."""
    order = np.argsort(-row, kind="stable")[:top_k]
    return [(labels.names[i], float(row[i])) for i in order]


def answer_columns(probabilities: npt.NDArray[Any], labels: LabelMap, top_k: int | None = None) -> list[list[Any]]:
    """The values of the columns that `list_answers` names."""
    names = predicted_names(probabilities, labels)
    if labels.task is Task.REGRESSION:
        return [names]
    if top_k is None:
        return [names, *probabilities.T.tolist()]
    best = [sorted_scores(row, labels, top_k) for row in probabilities]
    return [names, *([row[place][side] for row in best] for place in range(min(top_k, len(labels))) for side in (0, 1))]


def _load_graph(seal: Seal, threads: int | None) -> tuple[Network, ModelFacts]:
    from tunesmith.predict.graph_network import load_graph_network

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
            from tunesmith.predict.torch_network import load_torch_network
        except ModuleNotFoundError as error:
            name_the_extra(error, str(seal.folder), "" if graph else ", or export the model (`tunesmith export`).")
            raise
        network, facts = load_torch_network(seal, use_cpu=use_cpu, precision=precision, threads=threads)
        return cls(network, facts, Path(path))

    def __repr__(self) -> str:
        labels = self.facts.labels
        names = ", ".join(labels.names[:SHOWN_LABELS])
        more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
        reads = " + ".join(self.facts.text_columns or ("text",))
        text = f"Predictor({self.folder}: {reads} -> {labels.task.value} ({names}{more}), {self.network.name})"
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
