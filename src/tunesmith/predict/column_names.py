"""Names for the columns we add beside those of a person: a name that is taken is never written over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, count

from tunesmith.labels import LabelMap, Task


def list_answers(labels: LabelMap, top_k: int | None = None) -> list[str]:
    """Our columns for the answers of a model: prediction, and prob_NAME for each label; or the `top_k` best, sorted."""
    if labels.task is Task.REGRESSION:
        return ["prediction"]
    if top_k is not None:
        places = range(1, min(top_k, len(labels)) + 1)
        return ["prediction", *(f"{what}_{place}" for place in places for what in ("label", "prob"))]
    return ["prediction", *(f"prob_{name}" for name in labels.names)]


def choose_column_names(ours: Sequence[str], taken: Iterable[str]) -> list[str]:
    """A free name for each of our columns, in order: its own, else tunesmith_NAME, else that with a number."""
    used = set(taken)
    chosen = []
    for name in ours:
        candidates = chain((name, f"tunesmith_{name}"), (f"tunesmith_{name}_{n}" for n in count(2)))
        found = next(candidate for candidate in candidates if candidate not in used)
        used.add(found)
        chosen.append(found)
    return chosen


def names_of_run(text: Sequence[str], labels: LabelMap) -> dict[str, str]:
    """Our columns of predictions.parquet -> their names beside the text columns of the data."""
    ours = ["split", "row", "label", *list_answers(labels), "truncated"]
    return dict(zip(ours, choose_column_names(ours, text), strict=True))


def describe_renaming(ours: Iterable[str], chosen: Iterable[str]) -> str | None:
    """One line when a name was taken; None when all have their own."""
    moved = [f"{new!r} instead of {old!r}" for old, new in zip(ours, chosen, strict=True) if old != new]
    if not moved:
        return None
    more = f" and {len(moved) - 6} more" if len(moved) > 6 else ""
    return f"Columns of the data have names of ours: the predictions use {', '.join(moved[:6])}{more}."
