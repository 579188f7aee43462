"""One number for the content of all splits: same rows in the same order, same number, whatever file they came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from tunesmith.labels import LabelMap
from tunesmith.reading.part import Part


def fingerprint_parts(parts: Mapping[str, Part], text: Sequence[str], labels: LabelMap) -> tuple[str, dict[str, str]]:
    """sha256 (hex) over split names, texts, labels, label names and their order, and one for each split.

    Columns that are neither text nor label do not count.
    """
    whole = hashlib.sha256(json.dumps([labels.to_json(), list(text)]).encode())
    found = {}
    for split, part in parts.items():
        pieces = [f"\n{split} {len(part)}".encode(), *(_hash_text(part, name) for name in text), _hash_labels(part)]
        found[split] = hashlib.sha256(b"".join(pieces)).hexdigest()
        whole.update(b"".join(pieces))
    return whole.hexdigest(), found


def _hash_text(part: Part, name: str) -> bytes:
    """Lengths and bytes are hashed apart, so that the result does not depend on how rows are cut into batches."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths, content = hashlib.sha256(), hashlib.sha256()
    for table in part.scan([name]):
        cells = pc.fill_null(table.column(name).cast(pa.large_string()).combine_chunks(), "")
        if not len(cells):
            continue
        lengths.update(pc.binary_length(cells).to_numpy(zero_copy_only=False).astype("<i8").tobytes())
        _, offsets, data = cells.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)
        first, last = ends[cells.offset], ends[cells.offset + len(cells)]
        if data is not None:
            content.update(memoryview(data)[first:last])
    return lengths.digest() + content.digest()


def _hash_labels(part: Part) -> bytes:
    import pyarrow as pa
    import pyarrow.compute as pc

    cells = part.labels()
    if pa.types.is_list(cells.type):
        cells = pc.list_flatten(cells)
    return hashlib.sha256(np.ascontiguousarray(cells.to_numpy(zero_copy_only=False)).tobytes()).digest()
