"""Label names and ids: one map for all splits of a run."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Task(StrEnum):
    """The kind of label of a task."""

    BINARY = "binary"
    MULTICLASS = "multiclass"
    MULTILABEL = "multilabel"
    REGRESSION = "regression"

    @property
    def problem_type(self) -> str:
        """Return the name that transformers uses in a model's config."""
        if self is Task.REGRESSION:
            return "regression"
        if self is Task.MULTILABEL:
            return "multi_label_classification"
        return "single_label_classification"


def choose_labels(probabilities: Any, task: Task, thresholds: Sequence[float] | None = None) -> Any:
    """Return the label id of each example: the largest probability relative to its threshold.

    For multilabel tasks, return which labels are above their thresholds, by default 0.5.
    """
    if task is Task.MULTILABEL:
        return probabilities > (0.5 if thresholds is None else tuple(thresholds))
    return (probabilities if thresholds is None else probabilities / tuple(thresholds)).argmax(axis=-1)


UNLABELED = -1
"""The label id of an unlabeled example (GLUE test splits)."""


VARIANTS = "case, spaces, Unicode form or invisible characters"


def fold_label(name: str) -> str:
    """Return a key that is equal for labels that differ only in VARIANTS."""
    visible = "".join(char for char in name if unicodedata.category(char) not in ("Cf", "Cc") or char.isspace())
    return " ".join(unicodedata.normalize("NFC", visible).casefold().split())


def match_names(order: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | None:
    """Return `names` in the order of `order`; they may differ in VARIANTS. None if they are different names."""
    if set(order) == set(names) and len(order) == len(names):
        return tuple(order)
    folded = {fold_label(name): name for name in names}
    keys = list(map(fold_label, order))
    if len(folded) != len(names) or len(set(keys)) != len(keys) or set(keys) != set(folded):
        return None
    return tuple(folded[key] for key in keys)


@dataclass(frozen=True, slots=True)
class LabelMap:
    """Label names in id order. For regression, the only name is that of the target column."""

    names: tuple[str, ...]
    task: Task
    thresholds: tuple[float, ...] | None = None
    """Threshold of each label for `choose_labels`; (1 - t, t) for two classes selects the second at t or more."""

    abstention: Any = None
    """The `metrics.calibration.Abstention` of a predictor that answers only if it is sure; None: it answers all examples."""

    @classmethod
    def for_classes(cls, names: Sequence[str]) -> LabelMap:
        """Return the map of a single-label task: binary for two names, otherwise multiclass."""
        return cls(tuple(names), Task.BINARY if len(names) == 2 else Task.MULTICLASS)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def positive_name(self) -> str | None:
        """Return the class that F1, precision and recall refer to: label 1 of two."""
        return self.names[1] if self.task is Task.BINARY and len(self.names) == 2 else None

    @property
    def class_order(self) -> list[int]:
        """Return ids in the order of scikit-learn's `classes_`: sorted names, numbers by value."""
        try:
            keys: list[Any] = [float(name) for name in self.names]
        except ValueError:
            keys = list(self.names)
        return sorted(range(len(keys)), key=keys.__getitem__)

    @property
    def id2label(self) -> dict[int, str]:
        """Return the mapping of a transformers config."""
        return dict(enumerate(self.names))

    @property
    def label2id(self) -> dict[str, int]:
        """Return the mapping of a transformers config."""
        return {name: i for i, name in enumerate(self.names)}

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict for `from_json`."""
        moved = {} if self.thresholds is None else {"thresholds": list(self.thresholds)}
        return {"names": list(self.names), "task": self.task.value, **moved}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LabelMap:
        """Return the map that `to_json` wrote; a ValueError if it is damaged."""
        found = data.get("thresholds")
        if found is not None and (len(found) != len(data["names"]) or not all(0 < t <= 1 for t in found)):
            raise ValueError(f"thresholds are {found!r}, not a number above 0 for each label")
        return cls(tuple(data["names"]), Task(data["task"]), None if found is None else tuple(map(float, found)))
