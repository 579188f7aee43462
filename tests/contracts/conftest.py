"""The syntax trees are forgotten when the contracts are done: each later collection of garbage would walk through all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from source_tree import import_nodes, imports_of, nodes_of, parse


@pytest.fixture(scope="package", autouse=True)
def _forget_trees() -> Iterator[None]:
    yield
    for cached in (parse, nodes_of, import_nodes, imports_of):
        cached.cache_clear()
