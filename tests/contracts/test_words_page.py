"""docs/concepts/words.md: one line a word, what it names is in the source, and every public class is listed."""

from __future__ import annotations

import re

from docs.words import PAGE, public_classes, words_page
from source_tree import SRC


def read_words() -> list[tuple[str, list[str]]]:
    """(word, names in the code) of every line of the table."""
    page = PAGE.read_text(encoding="utf-8").partition("## Classes")[0]
    lines = re.findall(r"^\| (.+?) \| .+ \| (`.+`) \|$", page, re.MULTILINE)
    return [(word, re.findall(r"`([^`]+)`", names)) for word, names in lines]


def test_a_word_has_one_line_in_the_order_of_the_alphabet() -> None:
    words = [word.casefold() for word, _ in read_words()]
    assert len(words) > 80
    assert words == sorted(set(words))


def test_what_a_word_names_is_in_the_source() -> None:
    classes = {name for name, _, _ in public_classes()}
    named = {name for _, names in read_words() for name in names}
    assert {n for n in named - classes if not (SRC / n).is_file() and not (SRC.parents[1] / n).is_file()} == set()


def test_every_public_class_is_listed() -> None:
    assert PAGE.read_text(encoding="utf-8") == words_page(), "run: PYTHONPATH=tests python tests/docs/words.py"


def test_every_public_class_has_a_docstring() -> None:
    assert [name for name, _, text in public_classes() if not text] == []
