"""What a tokenizer makes of the texts: scripts it cannot read, unknown tokens, several scripts and languages."""

from __future__ import annotations

from typing import Any

import pytest

from tunesmith.data.audit import check_tokens

ENGLISH = ("the film was very good and we liked it", "this book is not what the author had promised")
GERMAN = ("der film war sehr gut und das ist nicht alles", "das buch ist nicht von dem autor und auch nicht gut")
RUSSIAN = ("этот фильм был очень хорош", "книга оказалась не такой")
JAPANESE = ("この映画はとても良かったです", "その本は期待していたものではない")


class Words:
    """Knows lower-case Latin words; every other word is one unknown token."""

    unk_token_id: int | None = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word.isascii()) for word in text.split()] for text in texts]}


class Letters:
    """Spells: a token for each letter, and none is unknown."""

    unk_token_id: int | None = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in text.replace(" ", "")] for text in texts]}


class Bytes:
    """Byte-level: ASCII words are whole, everything else is its bytes."""

    unk_token_id: int | None = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * len(t.split()) if t.isascii() else list(t.encode()) for t in texts]}


def codes(tokenizer: Any, *texts: tuple[str, ...]) -> list[str]:
    return [finding.code for finding in check_tokens({"train": [t for some in texts for t in some * 40]}, tokenizer)]


@pytest.mark.parametrize(
    ("tokenizer", "texts", "found"),
    [
        (Words(), (ENGLISH,), []),
        (Words(), (RUSSIAN,), ["unknown_tokens"]),
        (Letters(), (RUSSIAN,), ["unreadable_script"]),
        (Letters(), (JAPANESE,), []),
        (Bytes(), (JAPANESE,), ["unreadable_script"]),
        (Bytes(), (ENGLISH, RUSSIAN), ["unreadable_script", "mixed_scripts"]),
        (Words(), (ENGLISH, GERMAN), ["mixed_languages"]),
        (Letters(), (ENGLISH,), []),
        (Letters(), (GERMAN,), ["foreign_language"]),
    ],
)
def test_what_the_tokenizer_cannot_read_is_found(tokenizer: Any, texts: tuple[Any, ...], found: list[str]) -> None:
    assert codes(tokenizer, *texts) == found


def test_the_unknown_words_are_named() -> None:
    found = check_tokens({"train": [f"{text} 🙂" for text in ENGLISH]}, Words())
    assert found[0].code == "unknown_tokens"
    assert found[0].evidence.endswith("mostly so: '🙂'.")
