"""What y holds: one class a row, several labels a row, or a number; and the way back from label names to its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets


@dataclass(frozen=True)
class Targets:
    """`column` goes into the training table under `names`; `classes` are the same labels as the user wrote them."""

    column: list[Any]
    classes: Any
    names: tuple[str, ...]
    multilabel: bool = False
    hot: bool = False
    """y was a table of 0 and 1."""

    def hot_rows(self, y: Any) -> Any:
        """y as a boolean table with a column for each class."""
        if self.hot:
            return np.asarray(y) > 0
        known = {name: i for i, name in enumerate(self.names)}
        unseen = sorted({str(label) for labels in y for label in labels} - known.keys())
        if unseen:
            raise ValueError(f"y contains previously unseen labels: {', '.join(map(repr, unseen[:10]))}")
        rows = np.zeros((len(y), len(self.names)), dtype=bool)
        for at, labels in enumerate(y):
            for label in labels:
                rows[at, known[str(label)]] = True
        return rows

    def to_json(self) -> dict[str, Any]:
        """A plain dict without the rows; `from_json` gives the rest back."""
        classes = self.classes.tolist()
        return {"classes": classes, "names": self.names, "multilabel": self.multilabel, "hot": self.hot}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Targets:
        """The targets that `to_json` wrote."""
        return cls([], np.asarray(data["classes"]), tuple(data["names"]), data["multilabel"], data["hot"])


def as_targets(y: Any) -> Targets:
    """The classes of y: 1-D values, a table of 0 and 1, or lists of labels."""
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None")
    shape = getattr(y, "shape", None)
    rows = list(y) if shape is None else y
    if shape is None and any(isinstance(row, (list, tuple, set, frozenset)) for row in rows):
        if all(isinstance(row, (list, tuple)) for row in rows) and _is_hot(rows):
            return _hot_targets(np.asarray(rows), [str(k) for k in range(len(rows[0]))])
        return _list_targets(rows)
    if shape is None:
        _refuse_missing(rows)  # an array of text would hold 'nan'
    array = np.asarray(y)
    if array.ndim == 2 and array.shape[1] > 1:
        return _hot_targets(array, [str(name) for name in getattr(y, "columns", range(array.shape[1]))])
    if array.ndim == 2:
        array = array.ravel()
    if array.dtype == object and len(array) and isinstance(array[0], (list, tuple, set, np.ndarray)):
        return _list_targets(list(array))
    _refuse_missing(array.tolist())
    if array.dtype.kind in "UO" and len(set(array.tolist())) == len(array) >= 10:
        raise ValueError(f"y holds {len(array)} different classes in {len(array)} rows: are X and y swapped?")
    check_classification_targets(array)
    classes, ids = np.unique(array, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y holds the one class {classes.tolist()}: a classifier needs at least 2 classes")
    names = tuple(str(value) for value in classes.tolist())
    return Targets([names[i] for i in ids.tolist()], classes, names)


def as_numbers(y: Any) -> list[float]:
    """y as one finite number a row."""
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None")
    try:
        array = np.asarray(y, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("y holds something else than numbers; a regressor needs one number a row") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array.ravel()
    if array.ndim != 1:
        raise ValueError(f"y has the shape {array.shape}, expected one number a row")
    if not np.isfinite(array).all():
        raise ValueError("Input y contains NaN or infinity.")
    return [float(value) for value in array]


def _refuse_missing(values: list[Any]) -> None:
    if any(value is None or value != value for value in values):
        raise ValueError("Input y contains NaN: every row needs a class.")


def _is_hot(rows: list[Any]) -> bool:
    lengths = {len(row) for row in rows}
    flat = [v for row in rows for v in row]
    return (
        len(lengths) == 1
        and lengths != {1}
        and bool(flat)
        and all(not isinstance(v, str) and v in (0, 1) for v in flat)
    )


def _hot_targets(array: Any, names: list[str]) -> Targets:
    if not np.isin(array, (0, 1)).all():
        raise ValueError("a table y holds 0 and 1, a column for each label; other values were found")
    column = [[names[i] for i in np.flatnonzero(row)] for row in array]
    return Targets(column, np.asarray(names), tuple(names), multilabel=True, hot=True)


def _list_targets(rows: list[Any]) -> Targets:
    found = sorted({label for row in rows for label in row})
    if not found:
        raise ValueError("y holds empty lists only: there is nothing to learn")
    names = tuple(map(str, found))
    return Targets([[str(v) for v in row] for row in rows], np.asarray(found), names, multilabel=True)
