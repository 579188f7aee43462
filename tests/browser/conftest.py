"""One browser for a file of tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # after tests, which has a conftest, too
from devtools import CHROMIUM, Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install -y chromium)")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found
