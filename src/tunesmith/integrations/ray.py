"""Prediction in Ray Data: `ds.map_batches(TunesmithPredictor, fn_constructor_args=["runs/mine"], ...)`. It imports no Ray."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunesmith.inference.bulk import label_columns
from tunesmith.inference.predictor import Predictor


class TunesmithPredictor:
    """A model that each actor loads once; a batch comes back with the answers as further columns, rows in their order.

    `text_column_names`: default as in training. `top_k`: only the most probable labels. The rest is for `Predictor.load`.
    """

    def __init__(
        self, model: str, *, text_column_names: tuple[str, ...] | None = None, top_k: int | None = None, **loading: Any
    ) -> None:
        self._predictor = Predictor.load(model, **loading)
        self._text = tuple(text_column_names or self._predictor.facts.text_columns or ("text",))
        self._top_k = top_k

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        texts = {name: np.asarray(values).tolist() if name in self._text else [] for name, values in batch.items()}
        labelled = label_columns(self._predictor, texts, self._text, self._top_k, where="batch")
        return {**batch, **dict(list(labelled.items())[len(batch) :])}
