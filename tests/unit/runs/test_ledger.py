"""Whose file it is."""

from __future__ import annotations

import os
from pathlib import Path

from tunesmith.runs.ownership import is_ours, start_ledger, write_own


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    start_ledger(tmp_path)
    file = tmp_path / "metrics.json"
    write_own(file, b"{}")
    assert is_ours(file)
    os.truncate(file, 1 << 40)  # a hole of a terabyte: to hash it would take half an hour
    assert not is_ours(file)
    file.write_bytes(b"[]")
    assert not is_ours(file)
    file.write_bytes(b"{}")
    assert is_ours(file)
