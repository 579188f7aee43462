"""docs/concepts/architecture.md shows the house as it is."""

from __future__ import annotations

from contracts.test_layers import LEVELS
from docs.architecture import COMMAND, PAGE, imported_rooms, page_with, picture_edges, rooms_table, what_it_does


def test_the_page_lists_every_room_with_its_level() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with(rooms_table()), COMMAND


def test_every_room_says_what_it_does() -> None:
    assert [room for room in LEVELS if not what_it_does(room)] == []


def test_every_arrow_of_the_picture_is_an_import() -> None:
    edges, imports = set(picture_edges()), imported_rooms()
    assert len(edges) > 15
    assert {edge for edge in edges if edge not in imports and edge[::-1] not in imports} == set()


def test_the_picture_shows_every_package_on_the_way_of_the_data() -> None:
    aside = {"errors", "events", "files", "findings", "labels", "sample", "measure"}
    assert LEVELS.keys() - {room for edge in picture_edges() for room in edge} <= aside
