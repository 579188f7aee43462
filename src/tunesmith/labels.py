"""Label names and ids: one map for all splits of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Task(StrEnum):
    """What one label is."""

    BINARY = "binary"
    MULTICLASS = "multiclass"
    MULTILABEL = "multilabel"
    REGRESSION = "regression"

    @property
    def problem_type(self) -> str:
        """The name transformers uses in a model's config."""
        if self is Task.REGRESSION:
            return "regression"
        if self is Task.MULTILABEL:
            return "multi_label_classification"
        return "single_label_classification"


def choose_labels(probabilities: Any, task: Task, thresholds: Sequence[float] | None = None) -> Any:
    """The id of the label of each row: the largest probability, as a multiple of its threshold.

    For multilabel tasks which labels are above their thresholds; one half without, as transformers' own script decides.
    """
    if task is Task.MULTILABEL:
        return probabilities > (0.5 if thresholds is None else tuple(thresholds))
    return (probabilities if thresholds is None else probabilities / tuple(thresholds)).argmax(axis=-1)


UNLABELLED = -1
"""The label id of a row without a label (GLUE test splits)."""


def fold_label(name: str) -> str:
    """Equal for labels that differ only in case or spaces."""
    return " ".join(name.casefold().split())


def match_names(order: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | None:
    """`names` in the order of `order`, matched exactly or else but for case and spaces; None when they are others."""
    if set(order) == set(names) and len(order) == len(names):
        return tuple(order)
    folded = {fold_label(name): name for name in names}
    keys = list(map(fold_label, order))
    if len(folded) != len(names) or len(set(keys)) != len(keys) or set(keys) != set(folded):
        return None
    return tuple(folded[key] for key in keys)


@dataclass(frozen=True, slots=True)
class LabelMap:
    """Names in id order. A regression task has the one name of its target column."""

    names: tuple[str, ...]
    task: Task
    thresholds: tuple[float, ...] | None = None
    """Of each label, by which `choose_labels` decides; (1 - t, t) of two classes means the second from t on."""

    abstention: Any = None
    """The `metrics.abstain.Abstention` of a predictor that answers only if it is sure; None: it answers all examples."""

    @classmethod
    def for_classes(cls, names: Sequence[str]) -> LabelMap:
        """Single-label map: binary with two names, multiclass otherwise."""
        return cls(tuple(names), Task.BINARY if len(names) == 2 else Task.MULTICLASS)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def positive_name(self) -> str | None:
        """The class that F1, precision and recall are about: label 1 of two."""
        return self.names[1] if self.task is Task.BINARY and len(self.names) == 2 else None

    @property
    def class_order(self) -> list[int]:
        """Ids in the order of scikit-learn's `classes_`: sorted names, numbers by their value."""
        try:
            keys: list[Any] = [float(name) for name in self.names]
        except ValueError:
            keys = list(self.names)
        return sorted(range(len(keys)), key=keys.__getitem__)

    @property
    def id2label(self) -> dict[int, str]:
        """As in a transformers config."""
        return dict(enumerate(self.names))

    @property
    def label2id(self) -> dict[str, int]:
        """As in a transformers config."""
        return {name: i for i, name in enumerate(self.names)}

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives an equal map back."""
        moved = {} if self.thresholds is None else {"thresholds": list(self.thresholds)}
        return {"names": list(self.names), "task": self.task.value, **moved}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LabelMap:
        """The map that `to_json` wrote."""
        found = data.get("thresholds")
        if found is not None and (len(found) != len(data["names"]) or not all(0 < t <= 1 for t in found)):
            raise ValueError(f"thresholds are {found!r}, not a number above 0 for each label")
        return cls(tuple(data["names"]), Task(data["task"]), None if found is None else tuple(map(float, found)))
