"""The part of docs/concepts/words.md that is made from the code: the list of public classes.

PYTHONPATH=tests python tests/docs/words.py      # writes it into the page
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from source_tree import FILES, SRC, name_of, parse

PAGE = SRC.parents[1] / "docs" / "concepts" / "words.md"
START, END = "<!-- classes: PYTHONPATH=tests python tests/docs/words.py -->\n", "<!-- end of classes -->\n"


def public_classes() -> Iterator[tuple[str, str, str]]:
    """(name, file, first sentence of the docstring) of every public class."""
    for path in FILES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                text = " ".join((ast.get_docstring(node) or "").split())
                yield node.name, name_of(path), re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def words_page() -> str:
    """The page with the classes of today in it."""
    lines = [f"| `{name}` | `{file}` | {text.replace('|', '/')} |\n" for name, file, text in sorted(public_classes())]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    table = "".join(["| class | file | its docstring begins |\n|---|---|---|\n", *lines])
    return f"{before}{START}{table}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(words_page(), encoding="utf-8")
