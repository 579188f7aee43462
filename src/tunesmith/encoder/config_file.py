"""config.json of a model folder, read as if its author meant harm: what it asks for is bounded before a library sees it.

It also holds the names of the outputs of a trained classification head, in order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.labels import match_names

LONGEST_FILE = 16_000_000
"""Bytes of a JSON file beside the weights; 100,000 label names take a quarter of it."""
LARGEST_NUMBER = 2**31 - 1
"""Sizes and ids are 32-bit numbers at the most; a library takes some of them for the length of a list."""
MOST_LAYERS = 1000
MOST_LABELS = 100_000

_REPEATED = re.compile(r".*(layers?|blocks?|groups?|group_num|depths?|repeats|z_steps|block_sizes)")
"""Names of fields that say how many modules a model is built from."""
_SIZES = ("hidden_size", "dim", "intermediate_size", "hidden_dim", "vocab_size", "max_position_embeddings")


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Damaged, huge or not an object: a ConfigError."""
    if not file.is_file():
        return {}
    try:
        size = file.stat().st_size
        if size > LONGEST_FILE:
            raise ConfigError(f"has {size:,} bytes; the limit is {LONGEST_FILE:,}", where=str(file))
        stored = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        json.dumps(stored, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair cannot be written anywhere
    except ConfigError:
        raise
    except UnicodeEncodeError:
        raise ConfigError("holds half of a surrogate pair, which is not a character", where=str(file)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON ({error})", where=str(file)) from None
    if not isinstance(stored, dict):
        raise ConfigError("is not a JSON object", where=str(file))
    return stored


def read_config_file(folder: Path) -> dict[str, Any]:
    """config.json as a dict; empty when there is none (a folder with a tokenizer only). Absurd sizes are refused."""
    file = folder / "config.json"
    config = read_json_object(file)
    refuse_code(config, file)
    _check_labels(config, str(file))
    for path, value in _walk(config, ()):
        _check_value(path, value, str(file))
    for key in _SIZES:
        value = config.get(key, 1)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{key} is {value!r}, not a positive whole number", where=str(file))
    return config


def refuse_code(stored: dict[str, Any], file: Path) -> None:
    """A ConfigError when the file names Python code to be run."""
    if "auto_map" in stored:
        problem = "asks to run Python code from the model folder (auto_map), which tunesmith never does"
        raise ConfigError(problem, where=str(file), fix="Use a model whose architecture is part of transformers.")


def name_field(config: dict[str, Any], size: int) -> str:
    """The field of a config that asks for a table of `size` rows: " (type_vocab_size is 1000000)"; empty if none does."""
    found = next((path for path, value in _walk(config, ()) if value == size), None)
    return "" if found is None else f" ({_spell(found)} is {size})"


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every plain value with the names that lead to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(inner, (*path, str(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, path)
    else:
        yield path, value


def _check_value(path: tuple[str, ...], value: Any, where: str) -> None:
    name = _spell(path)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, not a finite number", where=where)
    if not isinstance(value, int) or isinstance(value, bool):
        return
    if abs(value) > LARGEST_NUMBER:
        raise ConfigError(f"{name} is {_short(value)}; the limit is {LARGEST_NUMBER}", where=where)
    if value > MOST_LAYERS and _REPEATED.fullmatch(path[-1]):
        raise ConfigError(f"{name} is {value}: a model of that many parts; the limit is {MOST_LAYERS}", where=where)


def _check_labels(config: dict[str, Any], where: str) -> None:
    count, names = config.get("num_labels"), config.get("id2label")
    if names is not None and not (isinstance(names, dict) and all(_is_id(key) for key in names)):
        raise ConfigError("id2label is not a table of whole numbers and names", where=where)
    for field, found in (("num_labels", count), ("id2label", len(names or ()))):
        if isinstance(found, int) and found > MOST_LABELS:
            raise ConfigError(f"{field} asks for {found} labels; the limit is {MOST_LABELS}", where=where)


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 10


def _spell(path: tuple[str, ...]) -> str:
    return ".".join(name if len(name) <= 60 else f"{name[:57]}..." for name in path)


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else f"a number of {number.bit_length()} bits"


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


@dataclass(frozen=True)
class HeadNames:
    """`names` in id order; empty when the model has no trained head, or one whose outputs were never named."""

    names: tuple[str, ...]

    def fits(self, names: Sequence[str]) -> bool:
        """Whether these labels, in this order, mean what the outputs of the head mean."""
        return match_names(self.names, names) == tuple(names)

    def refusal(self, names: Sequence[str], where: str) -> ConfigError:
        """The error for labels that could mean anything to this head."""
        theirs, ours = ", ".join(self.names[:6]), ", ".join(names[:6])
        if match_names(self.names, names) is not None:
            fix = "Leave --label_names out: the order of the model is used."
        else:
            fix = (
                f"If they mean the same in this order, give --label_names {','.join(self.names)}; "
                "--ignore_mismatched_sizes starts a new head."
            )
        return ConfigError(f"its head was trained for {theirs} and the data has {ours}", where=where, fix=fix)


def read_head_names(config: dict[str, Any]) -> HeadNames:
    """The names in a model's config.json. LABEL_0, LABEL_1, ... name nothing: they mean the ids."""
    kinds = config.get("architectures")
    classifier = isinstance(kinds, list) and any(str(kind).endswith("ForSequenceClassification") for kind in kinds)
    table = config.get("id2label")
    if not classifier or not isinstance(table, dict) or not all(str(key).isdecimal() for key in table):
        return HeadNames(())
    ordered = tuple(str(table[key]) for key in sorted(table, key=int))
    if all(re.fullmatch(r"LABEL_\d+", name) for name in ordered):
        return HeadNames(())
    return HeadNames(ordered)


def start_head_afresh(model: Any) -> tuple[str, ...]:
    """Draws everything above the encoder anew, as the model's own class does; gives the names of those parameters."""
    import torch

    fresh: list[str] = []
    for name, part in model.named_children():
        if name == model.base_model_prefix:
            continue
        for module in part.modules():
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False
            with torch.no_grad():
                model._init_weights(module)
        fresh += [f"{name}.{key}" for key, _ in part.named_parameters()]
    return tuple(fresh)
