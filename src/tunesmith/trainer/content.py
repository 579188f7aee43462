"""What a dataset, a collator or a function holds: as a hash, equal for equal content, None where nothing can be known; and as
token rows and padding, where they make the batches that the DataLoader would make."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import fields, is_dataclass
from enum import Enum
from types import CodeType
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithPadding
from transformers.trainer_utils import has_length

from tunesmith.data.batches import Padding
from tunesmith.data.tokens import TOKEN_COLUMNS, TokenRows

MARK_BYTES = 8
DEEPEST = 8
LIBRARIES = ("torch", "transformers", "datasets", "builtins", "tunesmith")
"""Their code has a version, which is compared by itself."""


def item_mark(item: Any) -> bytes | None:
    """A hash of one row as a dataset gives it; None when something in it cannot be hashed."""
    parts: list[bytes] = []
    try:
        _gather(parts.append, item, 0)
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError):
        return None
    return hashlib.blake2b(b"".join(parts), digest_size=MARK_BYTES).digest()


def _gather(put: Callable[[bytes], None], value: Any, depth: int) -> None:
    """Every part of a value with its kind and size. The usual kinds are tested first, as it is called for each row."""
    kind = type(value)
    if kind is list or kind is tuple:
        _gather_list(put, value, depth)
    elif isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        array_of = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
        put(f"{value.dtype}{array_of.shape};".encode())
        put(array_of.tobytes())
    elif kind is str:
        put(b"s%d " % len(value) + value.encode("utf-8", "surrogatepass"))
    elif (
        value is None or kind in (int, float, bool) or isinstance(value, (int, float, complex, bytes, np.generic, Enum))
    ):
        put(f"{kind.__name__} {value!r};".encode())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        put(f"{value.dtype.str}{value.shape};".encode())
        put(value.tobytes())
    elif isinstance(value, Mapping):
        if depth > DEEPEST:
            raise ValueError("too deep")
        put(b"{%d" % len(value))
        for key in sorted(value, key=str):
            put(b"%s:" % str(key).encode("utf-8", "surrogatepass"))
            _gather(put, value[key], depth + 1)
    elif isinstance(value, (list, tuple, np.ndarray)):
        _gather_list(put, value, depth)
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # an image
        put(f"{getattr(value, 'mode', '')} {value.size};".encode() + value.tobytes())
    elif vars(value):
        _gather(put, vars(value), depth + 1)
    else:
        raise TypeError(kind.__name__)


def _gather_list(put: Callable[[bytes], None], values: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise ValueError("too deep")
    put(b"[%d" % len(values))
    if len(values) and type(values[0]) is int:
        try:
            put(array("q", values).tobytes())
            return
        except (TypeError, OverflowError):
            pass
    for value in values:
        _gather(put, value, depth + 1)


def content_of(dataset: Any, depth: int = 0) -> str:
    """A hash of all that a dataset has in memory or in Arrow files; of a stream, of its kind alone.

    Arrow: every cell of every row, in order, through indices, with the format. A list: every row. Any other dataset: its
    length, and each attribute that has a value for every row or is a dataset itself.
    """
    digest = hashlib.sha256(type(dataset).__qualname__.encode())
    if dataset is None or depth > DEEPEST:
        return ""
    if isinstance(dataset, Mapping):
        digest.update(repr(sorted((str(name), content_of(part, depth + 1)) for name, part in dataset.items())).encode())
        return digest.hexdigest()
    if not has_length(dataset):
        return "stream"
    digest.update(f"{len(dataset)} rows".encode())
    if is_arrow_dataset(dataset):
        form = dataset.format
        digest.update(f"{form['type']} {sorted(map(str, form['columns']))}".encode())
        if dataset.column_names:
            digest.update(_arrow_content(dataset).encode())
    elif isinstance(dataset, (list, tuple)):
        digest.update(_rows_mark(dataset))
    else:
        for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
            found = _attribute_mark(value, len(dataset), depth)
            if found:
                digest.update(name.encode() + found)
    return digest.hexdigest()


def _arrow_content(dataset: Any) -> str:
    """Of indices over most rows, the stored rows and the indices: reading in that order takes 40 times as long."""
    from tunesmith.data.cache import content_hash

    indices = getattr(dataset, "_indices", None)
    columns = tuple(sorted(dataset.column_names))
    if indices is None or 2 * len(dataset) < dataset.data.num_rows:
        return content_hash(dataset, columns)
    order = np.asarray(indices.column(0)).astype("<i8")
    return content_hash(type(dataset)(dataset.data), columns) + hashlib.sha256(order.tobytes()).hexdigest()


def _rows_mark(rows: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(item_mark(row) or b"?")
    return digest.digest()


def _attribute_mark(value: Any, rows: int, depth: int) -> bytes:
    """The content of an attribute that holds rows; empty for counters, caches, tokenizers and the like."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return (item_mark(value) or b"") if value.ndim and len(value) == rows else b""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sized):
        return b""
    if hasattr(value, "columns") and hasattr(value, "iloc"):
        frame: Any = value  # pandas
        return b"".join(_rows_mark([str(name), *frame[name].tolist()]) for name in frame.columns)
    if isinstance(value, Mapping):
        parts = {str(k): _attribute_mark(v, rows, depth) for k, v in value.items()} if len(value) < 100 else {}
        return b"".join(k.encode() + found for k, found in sorted(parts.items()) if found)
    if isinstance(value, (list, tuple)):
        if len(value) == rows and not any(is_dataset(v) for v in value[:1]):
            return _rows_mark(value)
        return b"".join(_attribute_mark(v, rows, depth + 1) for v in value[:100]) if depth < DEEPEST else b""
    return content_of(value, depth + 1).encode() if is_dataset(value) else b""


def is_arrow_dataset(dataset: Any) -> bool:
    """Whether this is a map-style `datasets.Dataset` (known by what it can do: its library is not imported for it)."""
    return hasattr(dataset, "remove_columns") and hasattr(dataset, "data") and bool(has_length(dataset))


def is_dataset(value: Any) -> bool:
    """Whether this is a dataset: torch's, Arrow's, or one that looks like them."""
    return is_arrow_dataset(value) or isinstance(value, torch.utils.data.Dataset)


def settings_of(value: Any) -> str:
    """The kind of a collator or processor and its plain settings, without any other state."""
    if isinstance(value, functools.partial):
        return f"{settings_of(value.func)} {_plain([*value.args, *sorted(value.keywords.items())])}"
    if isinstance(value, type) or not is_dataclass(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    found = {f.name: getattr(value, f.name, None) for f in fields(value)}
    return f"{type(value).__qualname__} {_plain(sorted(found.items()))}"


def _plain(values: Any) -> str:
    kinds = (str, int, float, bool, type(None), Enum)
    return repr([v for v in values if not isinstance(v, tuple) or isinstance(v[-1], kinds)])


def code_of(value: Any) -> str:
    """The compiled code of a function, or of what a user's object does when it is called; empty for a library's own."""
    function = value
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    function = getattr(function, "__func__", function)
    module = str(getattr(function, "__module__", "")).split(".")[0]
    if module in LIBRARIES or not hasattr(function, "__code__"):
        return ""
    known = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    held = [(k, v) for k, v in sorted(known.items()) if isinstance(v, (str, int, float, type(None)))]
    return f"{_code_text(function.__code__)} {_plain([('', v) for v in function.__defaults__ or ()])} {held}"


def _code_text(code: CodeType) -> str:
    consts = [
        _code_text(c) if isinstance(c, CodeType) else re.sub(r" at 0x[0-9a-f]+", "", repr(c)) for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {consts} {code.co_names}"


def token_rows_of(dataset: Any) -> TokenRows | None:
    """The tokens of an Arrow dataset without a copy, or None when its rows are not plainly what is stored."""
    if not is_arrow_dataset(dataset) or getattr(dataset, "_indices", None) is not None:
        return None
    kind = getattr(dataset, "format", {}).get("type")
    if kind not in (None, "torch", "numpy") or "input_ids" not in dataset.column_names:
        return None
    table = dataset.data.table
    names = ["labels" if n == "label" and "labels" not in table.column_names else n for n in table.column_names]
    try:
        return TokenRows.from_arrow(table.rename_columns(names))
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return None


def holds_token_rows(dataset: Any, signature: list[str] | None, rows: TokenRows) -> bool:
    """Whether tokens, an all-ones mask and labels are all that a collated batch would hold."""
    if rows.labels is None or not len(rows) or (signature is not None and not set(rows.columns) <= set(signature)):
        return False
    known = {*TOKEN_COLUMNS, "attention_mask", "label", "labels"}
    shown = getattr(dataset, "format", {}).get("columns") or dataset.column_names
    if not {"input_ids", "attention_mask", *rows.columns} <= set(shown) <= known:
        return False
    label = dataset.data.table.column("labels" if "labels" in dataset.column_names else "label")
    if "string" in str(label.type):
        return False  # "1" is not 1: the collator refuses it, and so must this way
    masks = dataset.data.table.column("attention_mask")
    ones = all(bool(np.all(chunk.values.to_numpy(zero_copy_only=False) == 1)) for chunk in masks.chunks)
    return ones and int(sum(len(c.values) for c in masks.chunks)) == int(rows.lengths.sum())


def collator_padding(collator: Any) -> Padding | None:
    """Our padding, when it does what this collator does."""
    if type(collator) is not DataCollatorWithPadding or collator.padding not in (True, "longest"):
        return None
    tokenizer = collator.tokenizer
    if collator.return_tensors != "pt" or "attention_mask" not in tokenizer.model_input_names:
        return None
    return Padding(
        pad_token_id=tokenizer.pad_token_id,
        pad_token_type_id=getattr(tokenizer, "pad_token_type_id", 0),
        side=tokenizer.padding_side,
        multiple_of=collator.pad_to_multiple_of,
    )
