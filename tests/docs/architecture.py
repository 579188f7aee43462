"""The part of docs/concepts/architecture.md that is made from the code: the table of rooms.

PYTHONPATH=tests python tests/docs/architecture.py      # writes it into the page
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from contracts.test_layers import LEVELS, SAME_ROOM
from source_tree import FILES, SRC, imports_of, parse, room_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "architecture.md"
START, END = "<!-- rooms: PYTHONPATH=tests python tests/docs/architecture.py -->\n", "<!-- end of rooms -->\n"
COMMAND = "run: PYTHONPATH=tests python tests/docs/architecture.py"


def rooms_table() -> str:
    """One line a room: its level, the first sentence of its docstring, the rooms of its level that it may import."""
    lines = ["| level | room | what it does | may import, besides lower levels |", "|---|---|---|---|"]
    for room, level in sorted(LEVELS.items(), key=lambda item: item[1]):
        near = sorted({name for names in SAME_ROOM if room in names for name in names} - {room})
        lines.append(f"| {level} | `{room}` | {what_it_does(room)} | {', '.join(f'`{n}`' for n in near)} |")
    return "\n".join(lines) + "\n"


def what_it_does(room: str) -> str:
    """The first sentence of the docstring of a package or module."""
    file = SRC / room / "__init__.py" if (SRC / room).is_dir() else SRC / f"{room}.py"
    text = ast.get_docstring(parse(file)) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def page_with(table: str) -> str:
    """The page with this table of rooms in it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{before}{START}{table}{END}{rest.partition(END)[2]}"


def picture_edges() -> Iterator[tuple[str, str]]:
    """Arrows of the Mermaid diagram, from room to room."""
    diagram = PAGE.read_text(encoding="utf-8").partition("```mermaid\n")[2].partition("```")[0]
    yield from re.findall(r"^ +(\w+) -->(?:\|[^|]*\|)? (\w+)$", diagram, re.MULTILINE)


def imported_rooms() -> set[tuple[str, str]]:
    """(room, room it imports) over all of src."""
    return {
        (room_of(path), name.split(".")[1])
        for path in FILES
        for name in imports_of(path, into_types=True)
        if name.startswith("tunesmith.")
    }


if __name__ == "__main__":
    PAGE.write_text(page_with(rooms_table()), encoding="utf-8")
