"""The format of a file, from its name."""

from __future__ import annotations

from pathlib import Path

from tunesmith.errors import DataError

KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".xlsx": "sheet",
    ".xlsm": "sheet",
    ".xls": "sheet",
    ".ods": "sheet",
}


def kind_of_file(path: Path, origin: str, delimiter: str | None) -> tuple[str, bool]:
    """(kind, whether it is gzipped); "lines" where the lines must tell."""
    suffixes = [s.lower() for s in path.suffixes]
    gzipped = bool(suffixes) and suffixes[-1] in (".gz", ".gzip")
    suffix = (suffixes[:-1] if gzipped else suffixes)[-1:] or [""]
    kind = KINDS.get(suffix[0])
    if kind is None and suffix[0] in (".txt", ".dat", ".ft"):
        kind = "lines" if delimiter is None else "csv"
    if kind is None and delimiter is not None and not suffix[0]:
        kind = "csv"
    if kind is None:
        known = "csv, tsv, jsonl, json, txt, xlsx, parquet, arrow, each also as .gz"
        fix = "Unpack it first, or use gzip." if suffix[0] == ".zip" else None
        raise DataError(
            f"cannot tell the format from the ending {suffix[0]!r}: known are {known}", where=origin, fix=fix
        )
    return kind, gzipped
