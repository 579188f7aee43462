"""Prediction with Ray Data: `ds.map_batches(TunesmithPredictor, fn_constructor_args=["runs/mine"], ...)`. Does not import Ray."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunesmith.inference.bulk import label_columns
from tunesmith.inference.predictor import Predictor


class TunesmithPredictor:
    """A model that each actor loads once. A call returns the batch with additional columns for the predictions.

    `text_column_names` defaults to the columns of training. `top_k` keeps only the most probable labels. Other options are those
    of `Predictor.load`.
    """

    def __init__(
        self, model: str, *, text_column_names: tuple[str, ...] | None = None, top_k: int | None = None, **loading: Any
    ) -> None:
        self._predictor = Predictor.load(model, **loading)
        self._text = tuple(text_column_names or self._predictor.facts.text_columns or ("text",))
        self._top_k = top_k

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        texts = {name: np.asarray(values).tolist() if name in self._text else [] for name, values in batch.items()}
        labeled = label_columns(self._predictor, texts, self._text, self._top_k, where="batch")
        return {**batch, **dict(list(labeled.items())[len(batch) :])}
