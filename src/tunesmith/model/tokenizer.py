"""The tokenizer of a model, from disk and without running any code of the model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.model.resolve import resolve_model

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
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # a damaged tokenizer.json can panic in Rust: that is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"the tokenizer cannot be loaded ({text[:200]})", where=str(folder)) from error
    if tokenizer.pad_token is None:
        raise ConfigError("the tokenizer has no padding token", where=str(folder), fix="Use an encoder model.")
    return tokenizer


def position_limit(config: Any) -> int | None:
    """The longest row the position table of a model takes, from its config (object or dict); None when there is no table."""
    read = config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)
    rows = read("max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    if read("model_type", "") in _OFFSET_BY_PADDING:
        padding = read("pad_token_id", 1)
        rows -= (1 if padding is None else int(padding)) + 1
    return rows if rows > 0 else None


def _refuse_code(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            "has no tokenizer", where=str(folder), fix=f"One of these files is needed: {', '.join(TOKENIZER_FILES)}."
        )
    for name in ("tokenizer_config.json", "config.json"):
        if "auto_map" in _read_object(folder / name):
            raise ConfigError(
                "asks to run Python code from the model folder (auto_map), which tunesmith never does",
                where=str(folder / name),
                fix="Use a model that is part of transformers.",
            )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict; empty when there is none (a folder with a tokenizer only)."""
    return _read_object(folder / "config.json")


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON ({error})", where=str(file)) from None
    if not isinstance(stored, dict):
        raise ConfigError("is not a JSON object", where=str(file))
    return stored
