"""Results of an evaluation: batches joined, ranks joined, rows put where they belong."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.ranks.runtime import Runtime
from tunesmith.trainer.upstream import parts as upstream_parts
from tunesmith.trainer.upstream import trainer_log

PARTS = ("loss", "predictions", "labels", "inputs")
PADDING = -100
"""What shorter rows are filled up with where results of different width meet."""


class Gathered:
    """Collects the parts of batches; `concatenate=False` keeps them as lists of batches."""

    def __init__(self, *, concatenate: bool) -> None:
        self._concatenate = concatenate
        self._waiting: dict[str, list[Any]] = {name: [] for name in PARTS}
        self._arrays: dict[str, list[Any]] = {name: [] for name in PARTS}
        self._rows = 0

    def add(self, part: dict[str, Any]) -> None:
        """Keeps one batch's results, on the device they are on."""
        self._rows += part["rows"]
        for name in PARTS:
            if part[name] is not None:
                self._waiting[name].append(part[name])

    def to_cpu(self) -> None:
        """Moves what was kept so far to host memory."""
        for name, values in self._waiting.items():
            self._arrays[name] += [upstream_parts.nested_numpify(v) for v in values]
            values.clear()

    def over_ranks(self, runtime: Runtime, rows: npt.NDArray[np.int64] | None) -> dict[str, Any]:
        """Each part over all ranks, in the order of the dataset where the rows are known; None for a part that is missing."""
        self.to_cpu()
        parts = runtime.gather_objects((self._arrays, rows, self._rows))
        out: dict[str, Any] = {"rows": sum(count for _, _, count in parts)}
        known = [r for _, r, _ in parts]
        order = None if any(r is None for r in known) else np.concatenate([np.asarray(r) for r in known])
        for name in PARTS:
            batches = [b for arrays, _, _ in parts for b in arrays[name]]
            if not batches:
                out[name] = None
            elif name == "loss":
                out[name] = reordered(np.concatenate(batches), order)
            elif not self._concatenate:
                out[name] = batches
            else:
                out[name] = reordered(_joined(batches), order)
        return out


def _joined(batches: list[Any]) -> Any:
    """All batches as one; pairwise, so that a set of n batches is not copied n times."""
    while len(batches) > 1:
        pairs = range(0, len(batches) - 1, 2)
        joined = [upstream_parts.nested_concat(batches[i], batches[i + 1], padding_index=PADDING) for i in pairs]
        batches = joined + batches[len(joined) * 2 :]
    return batches[0]


def reordered(values: Any, order: npt.NDArray[np.int64] | None) -> Any:
    """Results in the order of the dataset; left as they are when the rows were not each fetched once."""
    if order is None or not np.array_equal(np.sort(order), np.arange(len(order))):
        return values
    if isinstance(values, (list, tuple)):
        return type(values)(reordered(v, order) for v in values)
    if isinstance(values, dict):
        return {k: reordered(v, order) for k, v in values.items()}
    if len(values) != len(order):
        return values
    out = np.empty_like(values)
    out[order] = values
    return out


def warn_of_nan(predictions: Any) -> None:
    """Tells of rows whose answer is no number: as in transformers they are given back, and argmax calls them class 0."""
    if not isinstance(predictions, np.ndarray) or predictions.dtype.kind != "f" or not len(predictions):
        return
    bad = np.flatnonzero(np.isnan(predictions.reshape(len(predictions), -1)).any(axis=1))
    if len(bad):
        trainer_log.warning(
            "the model's answer is not a number for %d of %d rows, the first at %d", len(bad), len(predictions), bad[0]
        )
