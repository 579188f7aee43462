"""tokenizer.json through the `tokenizers` library alone: what a graph runtime needs, without transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, short_text
from tunesmith.files import MAX_JSON_BYTES, BadFile, read_plain


@dataclass(frozen=True)
class PlainTokenizer:
    """The Rust core, and the settings that transformers keeps beside it."""

    backend_tokenizer: Any
    truncation_side: str
    split_special_tokens: bool

    @property
    def special(self) -> tuple[int, int]:
        """Special tokens of a row with one text, and with two."""
        count = self.backend_tokenizer.num_special_tokens_to_add
        return int(count(False)), int(count(True))


def load_plain_tokenizer(file: Path, *, truncation_side: str, split_special_tokens: bool) -> PlainTokenizer:
    """The tokenizer in a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        core = Tokenizer.from_str(read_plain(file, MAX_JSON_BYTES, follow=True).decode("utf-8"))
    except (OSError, BadFile) as error:
        raise ConfigError("cannot be read", where=str(file)) from error
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise ConfigError(f"is not a tokenizer ({short_text(error)})", where=str(file)) from None
    return PlainTokenizer(core, truncation_side, split_special_tokens)
