"""The tokenizer of a model, from disk and without running any code of the model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.encoder.config_file import read_config_file, read_json_object, refuse_code
from tunesmith.encoder.model_files import naming
from tunesmith.encoder.resolve import resolve_model
from tunesmith.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_OFFSET_BY_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text")
"""Model types whose positions start behind the padding id: a table of 514 rows takes 512 tokens."""


def load_tokenizer(
    path_or_name: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    allow_download: bool = True,
) -> Any:
    """A transformers tokenizer with a padding token. Never runs code from the folder; a local folder needs no network."""
    from transformers import AutoTokenizer

    folder = resolve_model(
        path_or_name,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        allow_download=allow_download,
        need_weights=False,
    )
    _refuse_code(folder)
    with naming("the tokenizer cannot be loaded", folder):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if tokenizer.pad_token is None:
            raise ConfigError("the tokenizer has no padding token", where=str(folder), fix="Use an encoder model.")
        _check_settings(tokenizer, folder)
    return tokenizer


def _check_settings(tokenizer: Any, folder: Path) -> None:
    """Refuses what transformers takes from tokenizer_config.json as it is and fails with later."""
    longest, names = tokenizer.model_max_length, tokenizer.model_input_names
    sides = (tokenizer.padding_side, tokenizer.truncation_side)
    problems = {
        f"model_max_length is {longest!r}, not a number from 1": not isinstance(longest, (int, float))
        or not longest >= 1,
        f"padding_side and truncation_side are {sides}, not left or right": not {*sides} <= {"left", "right"},
        f"model_input_names is {names!r}, without input_ids": "input_ids" not in names,
        f"the padding token {tokenizer.pad_token!r} has no id": not isinstance(tokenizer.pad_token_id, int),
    }
    for problem, found in problems.items():
        if found:
            raise ConfigError(problem[:300], where=str(folder / "tokenizer_config.json"))


def position_limit(config: Any) -> int | None:
    """The longest row the position table of a model takes, from its config (object or dict); None when there is no table."""
    read = config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)
    rows = read("max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    if read("model_type", "") not in _OFFSET_BY_PADDING:
        return rows
    padding = read("pad_token_id", 1)
    offset = (padding if isinstance(padding, int) else 1) + 1
    if rows <= offset:
        problem = f"max_position_embeddings {rows} has no position behind the {offset} of pad_token_id {padding}"
        raise ConfigError(problem)
    return rows - offset


def _refuse_code(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        fix = f"One of these files is needed: {', '.join(TOKENIZER_FILES)}."
        raise ConfigError("has no tokenizer", where=str(folder), fix=fix)
    read_config_file(folder)
    refuse_code(read_json_object(folder / "tokenizer_config.json"), folder / "tokenizer_config.json")


def require_segments(tokenizer: Any, config: Mapping[str, Any], *, pair: bool, where: str) -> None:
    """A ConfigError when the tokenizer numbers the second text of a pair with a segment that the model does not have."""
    known = config.get("type_vocab_size")
    if not pair or not known or "token_type_ids" not in tokenizer.model_input_names:
        return
    highest = max(tokenizer("a", "a")["token_type_ids"])
    if highest >= known:
        problem = f"the tokenizer gives the second text of a pair segment {highest}, but the model has only {known} segment(s)"
        fix = 'Use the tokenizer that belongs to the model, or leave "token_type_ids" out of its model_input_names.'
        raise ConfigError(problem, where=where, fix=fix)
