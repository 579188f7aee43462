"""The syntax trees are forgotten when the contracts are done."""

from __future__ import annotations

import pytest

from source_tree import forget_trees

_forget_trees = pytest.fixture(scope="package", autouse=True)(forget_trees)
