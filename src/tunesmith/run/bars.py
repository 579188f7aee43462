"""Progress bars that libraries draw, turned off for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def library_bars_off(library: ModuleType, *, except_on_a_terminal: bool = False) -> Iterator[None]:
    """`library` is `datasets` or `huggingface_hub.utils`; bars that were off before stay off."""
    if library.are_progress_bars_disabled() or (except_on_a_terminal and sys.stderr.isatty()):
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()
