"""`Predictor`: from texts to label names and probabilities, in input order. Importing it does not import torch.

Texts are processed in chunks: a thread tokenizes the next chunk while the model works on the current one, so that memory only
contains the tokens of a few chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.batches import TokenRows, prefetched
from tunesmith.data.rows import is_rendered, render_rows
from tunesmith.data.tokenize import TruncationCount, encode_texts, require_text_cells
from tunesmith.errors import ConfigError, DataError, ResourceError, first_few, name_the_extra
from tunesmith.inference.model_folder import ModelFacts, is_graph_folder, model_folder_of, read_facts
from tunesmith.inference.tables import answered_rows, predicted_names, probabilities_of, require_numbers
from tunesmith.labels import Task, choose_labels
from tunesmith.metrics.calibration import HeldOut
from tunesmith.runs.folder import MANIFEST

if TYPE_CHECKING:
    from tunesmith.inference.onnx_network import GraphNetwork
    from tunesmith.inference.torch_network import TorchNetwork
    from tunesmith.training.distributed import Precision

log = logging.getLogger(__name__)

CHUNK_ROWS = 8192
"""Rows sorted by length together. Larger chunks were not faster (bench/predict_speed.py)."""


@dataclass(frozen=True)
class TextPredictions:
    """Logits in input order. `truncated` counts truncated texts."""

    logits: npt.NDArray[np.float32]
    truncated: TruncationCount
    empty: tuple[int, ...] = ()
    """Rows without any token except special tokens."""


@dataclass(frozen=True, repr=False)
class Predictor:
    """A trained model: `predict(texts)` returns label names, `predict_proba(texts)` a DataFrame, `probabilities(texts)` an array.

    Columns of `predict_proba` are in the order of `classes_`, those of `probabilities` in the order of the model's `id2label`.
    """

    network: TorchNetwork | GraphNetwork
    facts: ModelFacts
    folder: Path

    @classmethod
    def load(cls, path: str | Path, *, use_cpu: bool = False, precision: Precision = "no") -> Predictor:
        """Load a run folder, an exported folder, or any model folder with a classification head."""
        seal = model_folder_of(path)
        folder = seal.folder
        if not seal.sealed:
            log.warning("%s has no %s, so its files are not verified", folder, MANIFEST)
        facts = read_facts(folder)
        graph = is_graph_folder(folder)
        network: TorchNetwork | GraphNetwork
        try:
            if graph:
                from tunesmith.inference.onnx_network import load_graph_network

                network = load_graph_network(folder, facts)
            else:
                from tunesmith.inference.torch_network import load_torch_network

                network = load_torch_network(folder, facts, use_cpu=use_cpu, precision=precision)
        except ModuleNotFoundError as error:
            name_the_extra(error, str(folder), "" if graph else ", or export the model (`tunesmith export`).")
            raise
        seal.require_unchanged()
        return cls(network, facts, Path(path))

    @property
    def classes_(self) -> list[str]:
        """Sorted label names, as in scikit-learn: the columns of `predict_proba`."""
        labels = self.facts.labels
        return [labels.names[k] for k in labels.class_order]

    def __repr__(self) -> str:
        labels = self.facts.labels
        reads = " + ".join(self.facts.text_columns or ("text",))
        text = f"Predictor({self.folder}: {reads} -> {labels.task.value} ({first_few(labels.names, 6)}), {self.network.name})"
        return " ".join(text.split())

    def predict(self, texts: Any, pairs: Any = None) -> list[Any]:
        """Return the label name of each text (multilabel: a list of names, regression: a number). A string is one text.

        A model that abstains returns None for texts that it is not sure about.
        """
        probabilities = self.probabilities(texts, pairs)
        names = predicted_names(probabilities, self.facts.labels)
        answered = answered_rows(probabilities, self.facts.labels)
        return [None if sure is False else name for name, sure in zip(names, answered, strict=True)]

    def abstaining(self, max_error: float, *, per_class: bool = False) -> Predictor:
        """Return a predictor that answers only if it is sure enough for an error rate of at most `max_error`.

        The error rate of the answered examples is at most `max_error` with 95% confidence, for each predicted class with
        `per_class`. A DataError says why if no threshold achieves that on the held-out examples of the run.
        """
        return replace(self, facts=self.facts.abstaining(max_error, per_class=per_class))

    def with_calibration(self, texts: Sequence[list[str]], labels: npt.NDArray[Any]) -> Predictor:
        """Return a predictor whose thresholds for abstaining are chosen on these examples; `labels` are label ids."""
        probabilities = probabilities_of(self.predict_texts(texts).logits, self.facts.labels.task)
        predicted = choose_labels(probabilities, self.facts.labels.task, self.facts.labels.thresholds)
        return replace(self, facts=replace(self.facts, held_out=HeldOut.of(probabilities, predicted, labels)))

    def predict_proba(self, texts: Any, pairs: Any = None) -> Any:
        """Return a DataFrame with one row per text and the columns of `classes_`. It keeps the index of a Series or DataFrame."""
        if self.facts.labels.task is Task.REGRESSION:
            raise ConfigError("a regression model returns numbers, not probabilities", fix="Use predict(texts).")
        try:
            import pandas as pd
        except ModuleNotFoundError:
            problem = "predict_proba returns a pandas DataFrame, and pandas is not installed"
            fix = "Use probabilities(texts), an array with a column for each label id."
            raise ResourceError(problem, fix=fix) from None
        index = texts.index if isinstance(texts, (pd.Series, pd.DataFrame)) else None
        table = self.probabilities(texts, pairs)[:, self.facts.labels.class_order]
        return pd.DataFrame(table, columns=self.classes_, index=index)

    def probabilities(self, texts: Any, pairs: Any = None) -> npt.NDArray[np.float64]:
        """Return one row of probabilities per text or pair, in the order of `id2label`; for regression, the value."""
        return probabilities_of(self.logits(texts, pairs), self.facts.labels.task)

    def logits(self, texts: Any, pairs: Any = None) -> npt.NDArray[np.float32]:
        """Return the logits of each text or pair."""
        columns = given_columns(texts, pairs, self.facts.text_columns)
        if not columns[0]:
            return np.zeros((0, len(self.facts.labels)), dtype=np.float32)
        return self.predict_texts(columns).logits

    def predict_texts(
        self,
        columns: Sequence[list[str]],
        *,
        max_rows: int | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> TextPredictions:
        """Return the logits of columns of texts, in input order; the next chunk is tokenized in the background."""
        sides, rows = len(columns), 0
        for column in columns:
            require_text_cells(column, 0)
        self.network.require_segments(sides)
        logits: list[npt.NDArray[np.float32]] = []
        cut: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
        empty: list[int] = []

        def encode(start: int) -> tuple[TokenRows, npt.NDArray[np.int32]]:
            chunk = [column[start : start + CHUNK_ROWS] for column in columns]
            return encode_texts(self.network.encoder, chunk, has_types=self.network.has_types)

        for tokens, lost in prefetched(iter(range(0, len(columns[0]), CHUNK_ROWS)), encode, ahead=1):
            highest = int(tokens.columns["input_ids"].values.max(initial=0))
            if highest >= (most := self.network.vocab_size):
                problem = f"the tokenizer produced token id {highest}, but the model has only {most} embeddings"
                raise DataError(problem, fix="Use the tokenizer that belongs to the model.")
            found = self.network.logits(tokens, max_rows=max_rows, on_batch=on_batch)
            require_numbers(found, before=rows)
            logits.append(found)
            empty += (rows + np.flatnonzero(tokens.lengths <= self.network.special[sides - 1])).tolist()
            rows += len(tokens)
            cut.append(lost)
        truncated = TruncationCount.of(np.concatenate(cut), self.network.max_length)
        every = np.concatenate(logits) if logits else np.zeros((0, 0), dtype=np.float32)
        return TextPredictions(every, truncated, tuple(empty))


_PAIR_KEYS = ("text", "text_pair")
_FORMS = "a string, or a list, Series or array of strings"
_PAIR_FORMS = (
    'a list of pairs such as [("first", "second")], two lists (texts, pairs), or a DataFrame with both columns'
)


def given_columns(texts: Any, pairs: Any, wanted: Sequence[str] | None) -> list[list[str]]:
    """Return one list of texts per text column. `wanted` are the columns of training, None if unknown.

    Three or more columns are rendered: rows are dicts or a table with these columns, or texts that were rendered earlier.
    """
    names = tuple(wanted or ())
    reads = f"the model reads the columns {', '.join(names)}"
    if len(names) > 2 and pairs is not None:
        raise DataError(f"pairs were passed, and {reads}", fix="Omit them.")
    named, columns = _read_columns(texts, names)
    if len(names) > 2:
        if named:
            return [render_rows(names, columns)]
        for number, row in enumerate(columns[0], start=1):
            if len(columns) > 1 or not (isinstance(row, str) and is_rendered(row, names)):
                fix = "Pass a DataFrame or dicts with these columns."
                raise DataError(f"row {number} is {_kind(row)}, and {reads}", fix=fix)
        return columns
    if pairs is not None:
        if len(columns) == 2 or named:
            raise DataError("pairs were passed in addition to a table or pairs", fix="Pass only one of them.")
        columns.append(_rows_of(pairs, "pairs"))
    if len(columns) == 2 and len(columns[0]) != len(columns[1]):
        raise DataError(f"{len(columns[0])} texts but {len(columns[1])} pairs")
    if names and len(columns) != len(names):
        if len(names) == 1:
            raise DataError(f"this model expects one text ({names[0]}), got a pair", fix=f"Pass {_FORMS}.")
        problem = f"this model expects text pairs ({' and '.join(names)}), got single texts"
        raise DataError(problem, fix=f"Pass {_PAIR_FORMS}.")
    return columns


def _read_columns(texts: Any, wanted: tuple[str, ...]) -> tuple[bool, list[list[Any]]]:
    """Return whether the columns have names, and those to read: one column, or two of pairs, if they have none."""
    if hasattr(texts, "columns") and hasattr(texts, "to_dict"):
        found = [str(name) for name in texts.columns]
        names = _names_to_read(found, wanted, ())
        return True, [texts.iloc[:, found.index(name)].tolist() for name in names]
    if isinstance(texts, Mapping) and all(isinstance(values, (list, tuple)) for values in texts.values()):
        return True, [list(texts[name]) for name in _names_to_read(list(texts), wanted, _PAIR_KEYS)]
    rows = _rows_of(texts, "texts")
    if rows and isinstance(rows[0], Mapping):
        names = list(wanted) if len(wanted) > 2 else _names_to_read(list(rows[0]), wanted, _PAIR_KEYS)
        return True, [[_cell(row, name, number) for number, row in enumerate(rows, start=1)] for name in names]
    if not rows or not isinstance(rows[0], (tuple, list)):
        return False, [rows]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, (tuple, list)) or len(row) != 2:
            raise DataError(f"row {number} is {_kind(row)}, not a pair of strings", fix=f"Pass {_PAIR_FORMS}.")
    return False, [list(column) for column in zip(*rows, strict=True)]


def _names_to_read(found: list[str], wanted: tuple[str, ...], usual: tuple[str, ...]) -> list[str]:
    """Return the columns of training; or the usual names; or all of one or two columns."""
    known = [name for name in usual if name in found]
    if wanted and set(wanted) <= set(found) and (len(wanted) > 1 or len(known) < 2):
        return list(wanted)
    if len(wanted) <= 2 and known:
        return known
    if len(found) in (1, 2) and len(wanted) in (0, len(found)) and not usual:
        return found
    lacking = next((name for name in wanted if name not in found), "text")
    fix = 'Rename its columns, or use the keys "text" and "text_pair".'
    raise DataError(f"the table has no column {lacking!r}, only {', '.join(map(str, found[:10]))}", fix=fix)


def _rows_of(values: Any, name: str) -> list[Any]:
    """Return a list of rows; a single string or dict is one row."""
    if isinstance(values, (str, Mapping)):
        return [values]
    if values is None or isinstance(values, (bytes, int, float, bool, set, frozenset)):  # a set has no order
        raise DataError(f"{name} must be {_FORMS}, not {_kind(values)}")
    if hasattr(values, "tolist"):  # Series and arrays
        values = values.tolist()
        return values if isinstance(values, list) else [values]
    try:
        return list(values)
    except TypeError:
        raise DataError(f"{name} must be {_FORMS}, not {_kind(values)}") from None


def _cell(row: Any, key: Any, number: int) -> Any:
    if not isinstance(row, Mapping) or key not in row:
        raise DataError(f"row {number} has no {key!r}")
    return row[key]


def _kind(value: Any) -> str:
    shown, kind = repr(value), type(value).__name__
    article = "an" if kind[:1] in "aeiou" else "a"
    return "None" if value is None else f"{article} {kind} ({shown if len(shown) <= 40 else shown[:37] + '...'})"
