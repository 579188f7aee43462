"""The input of a predictor -> one or two columns of texts; anything else is refused with what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.errors import DataError

_PAIR_KEYS = ("text", "text_pair")
_FORMS = "a string, or a list, Series or array of strings"
_PAIR_FORMS = (
    'a list of pairs such as [("first", "second")], two lists (texts, pairs), or a DataFrame with both columns'
)


def given_columns(texts: Any, pairs: Any, wanted: Sequence[str] | None) -> list[list[str]]:
    """One list of texts for each text column. `wanted` are the columns the model was trained on, None when unknown."""
    if hasattr(texts, "columns") and hasattr(texts, "to_dict"):
        columns = _from_frame(texts, wanted)
        if pairs is not None:
            raise DataError("pairs are given beside a table", fix="Give one of them.")
    else:
        columns = _from_rows(_rows_of(_as_rows(texts), "texts"), wanted)
        if pairs is not None:
            if len(columns) == 2:
                raise DataError("pairs are given twice: in texts, and as pairs", fix="Give one of them.")
            columns.append(_strings(_rows_of(pairs, "pairs"), "pair"))
    if len(columns) == 2 and len(columns[0]) != len(columns[1]):
        raise DataError(f"{len(columns[0])} texts but {len(columns[1])} pairs")
    if wanted is not None and len(columns) != len(wanted):
        names = " and ".join(wanted)
        if len(wanted) == 1:
            raise DataError(f"this model reads one text ({names}), a pair was given", fix=f"Give {_FORMS}.")
        raise DataError(f"this model reads pairs of texts ({names}), single texts were given", fix=_pair_hint())
    return columns


def _pair_hint() -> str:
    return f"Give {_PAIR_FORMS}."


def _as_rows(texts: Any) -> Any:
    """A dict of lists as a list of dicts; anything else as it is."""
    if not isinstance(texts, Mapping) or not all(isinstance(values, (list, tuple)) for values in texts.values()):
        return texts
    return [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]


def _rows_of(values: Any, name: str) -> list[Any]:
    """A single string or dict is one row; anything with elements is a list of rows."""
    if isinstance(values, (str, Mapping)):
        return [values]
    if values is None or isinstance(values, (bytes, int, float, bool, set, frozenset)):  # a set has no order
        raise DataError(f"{name} must be {_FORMS}, not {_kind(values)}")
    if hasattr(values, "tolist"):  # Series and arrays: their elements as plain Python values
        values = values.tolist()
        return values if isinstance(values, list) else [values]
    try:
        return list(values)
    except TypeError:
        raise DataError(f"{name} must be {_FORMS}, not {_kind(values)}") from None


def _from_frame(frame: Any, wanted: Sequence[str] | None) -> list[list[str]]:
    names = [str(name) for name in frame.columns]
    if wanted is not None and set(wanted) <= set(names):
        chosen = list(wanted)
    elif len(names) in (1, 2) and (wanted is None or len(wanted) == len(names)):
        chosen = names
    else:
        expected = " and ".join(map(repr, wanted)) if wanted else "one or two text columns"
        raise DataError(f"the table has no {expected}, but {', '.join(names[:10])}", fix="Name its columns so.")
    order = [names.index(name) for name in chosen]
    return [_strings(frame.iloc[:, at].tolist(), f"column {name}, row") for at, name in zip(order, chosen, strict=True)]


def _from_rows(rows: list[Any], wanted: Sequence[str] | None) -> list[list[str]]:
    if rows and isinstance(rows[0], Mapping):
        named = wanted is not None and set(wanted) <= rows[0].keys() and _PAIR_KEYS[1] not in rows[0]
        keys = tuple(wanted) if wanted is not None and named else _PAIR_KEYS
        keys = tuple(key for key in keys if key in rows[0])
        if not keys:
            fix = 'Give "text" and "text_pair".'
            raise DataError(f"text 1 is a dict with {', '.join(map(repr, rows[0]))}", fix=fix)
        return [_strings([_cell(row, key, i) for i, row in enumerate(rows)], f"{key} of row") for key in keys]
    if rows and isinstance(rows[0], (tuple, list)):
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, (tuple, list)) or len(row) != 2:
                raise DataError(f"row {number} is {_kind(row)}, not a pair of strings", fix=_pair_hint())
        return [_strings([row[side] for row in rows], f"{['first', 'second'][side]} text") for side in (0, 1)]
    return [_strings(rows, "text")]


def _cell(row: Any, key: str, index: int) -> Any:
    if not isinstance(row, Mapping) or key not in row:
        raise DataError(f"row {index + 1} has no {key!r}")
    return row[key]


def _strings(values: list[Any], name: str) -> list[str]:
    for number, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"{name} {number} is {_kind(value)}, not a string", fix=f"Give {_FORMS}.")
    return values


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    shown = repr(value)
    kind = type(value).__name__
    article = "an" if kind[:1] in "aeiou" else "a"
    return f"{article} {kind} ({shown if len(shown) <= 40 else shown[:37] + '...'})"
