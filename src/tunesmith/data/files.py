"""A file as bytes, then as text, block by block, with the exact place of what cannot be read.

Bytes: gzip with a limit on what may come out. Text: a byte order mark decides (UTF-8, UTF-16, UTF-32); without one the text is
UTF-8 unless an encoding is set. Bytes that do not decode are refused, never replaced; the error names a likely encoding for
the user to confirm. NUL is refused: it is the mark of UTF-16 or of a damaged file.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import ConfigError, DataError, ResourceError

CHUNK_BYTES = 1 << 20
_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
"""The errors of a path that leads to no file: a link to itself, a file used as a folder, too long a name."""
KINDS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
KINDS |= {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}
KINDS |= dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), "sheet")
"""Ending -> format."""


def kind_of_file(path: Path, origin: str, delimiter: str | None) -> tuple[str, bool]:
    """(kind, whether it is gzipped); "lines" if the kind must be recognized from the content."""
    suffixes = [s.lower() for s in path.suffixes]
    gzipped = bool(suffixes) and suffixes[-1] in (".gz", ".gzip")
    suffix = (suffixes[:-1] if gzipped else suffixes)[-1:] or [""]
    kind = KINDS.get(suffix[0])
    if suffix[0] in (".txt", ".dat", ".ft"):
        kind = "lines" if delimiter is None else "csv"
    elif not suffix[0] and delimiter is not None:
        kind = "csv"
    if kind is None:
        known = "csv, tsv, jsonl, json, txt, xlsx, parquet, arrow, each also as .gz"
        named = "Rename the file, or set --delimiter if its lines are a table."
        fix = {".zip": "Unpack it first, or use gzip.", "": named}.get(suffix[0])
        problem = f"cannot tell the format from the ending {suffix[0]!r}: known are {known}"
        raise DataError(problem, where=origin, fix=fix)
    return kind, gzipped


@dataclass(frozen=True, slots=True)
class DecompressionLimits:
    """How much a compressed file may grow. The ratio counts only once `ratio_free_bytes` have come out."""

    max_decompressed_bytes: int = 64 << 30
    max_ratio: float = 200.0
    ratio_free_bytes: int = 64 << 20


class CountedBytes:
    """A file read once from start to end. Decompresses `.gz` within limits; `sha256` covers the bytes on disk."""

    def __init__(
        self,
        path: Path,
        *,
        origin: str,
        gzipped: bool,
        limits: DecompressionLimits,
    ) -> None:
        self.origin = origin
        self.limits = limits
        self.size = path.stat().st_size
        self.bytes_in = self.bytes_out = 0
        self._hash = hashlib.sha256()
        self._file = path.open("rb", buffering=0)
        self._unpacked = gzip.GzipFile(fileobj=_Hooked(self._read_file)) if gzipped else None  # type: ignore[call-overload]

    def __enter__(self) -> CountedBytes:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        """Of what was read from disk so far."""
        return self._hash.hexdigest()

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        try:
            data: bytes = self._read_file(size) if self._unpacked is None else self._unpacked.read(size)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            problem = f"the gzip file is damaged or cut short after {self.bytes_out:,} bytes ({error})"
            raise DataError(problem, where=self.origin, fix="Make the file again, or copy it again.") from None
        except OSError as error:
            raise ResourceError(f"cannot be read ({error.strerror or error})", where=self.origin) from None
        self.bytes_out += len(data)
        if self._unpacked is not None:
            self._check_growth()
        return data

    def _read_file(self, size: int = -1) -> bytes:
        data = self._file.read(size) or b""
        self._hash.update(data)
        self.bytes_in += len(data)
        return data

    def _check_growth(self) -> None:
        too_many = self.bytes_out > self.limits.max_decompressed_bytes
        ratio = self.bytes_out / max(self.bytes_in, 1)
        too_dense = self.bytes_out > self.limits.ratio_free_bytes and ratio > self.limits.max_ratio
        if too_many or too_dense:
            limit = f"{self.limits.max_decompressed_bytes:,} bytes" if too_many else f"{self.limits.max_ratio:g} to 1"
            size = f"{self.bytes_out:,} bytes ({ratio:,.0f} to 1)"
            fix = "Decompress the file yourself if you trust it."
            raise DataError(f"decompresses to more than {size}, over the limit of {limit}", where=self.origin, fix=fix)


@dataclass(frozen=True)
class _Hooked:
    """What gzip reads from."""

    read: Callable[[int], bytes]


@contextmanager
def readable(path: Path, origin: str) -> Iterator[None]:
    """Turns errors of the operating system about a file into errors of this package."""
    try:
        yield
    except FileNotFoundError:
        near = _siblings(path)
        raise DataError("no such file", where=origin, fix=f"Files there: {near}." if near else None) from None
    except IsADirectoryError:
        raise DataError("is a folder, not a file", where=origin) from None
    except PermissionError:
        raise ResourceError("no permission to read it", where=origin, fix="Check the owner and mode.") from None
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise DataError(f"cannot be opened ({error.strerror})", where=origin, fix="Give the path of a file.") from None


def _siblings(path: Path) -> str:
    if not path.parent.is_dir() or not os.access(path.parent, os.R_OK | os.X_OK):
        return ""
    return ", ".join(sorted(p.name for p in path.parent.iterdir() if p.suffix == path.suffix)[:5])


_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark starts with the UTF-16 one
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_WITHOUT_MARK = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
OnProgress = Callable[[int, int], None]


class UnreadableText(Exception):
    """Raised after the readable text before it was yielded; the parser adds line and field."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix

    def at(self, where: str) -> DataError:
        """The error a person reads."""
        return DataError(self.problem, where=where, fix=self.fix)


def text_blocks(stream: CountedBytes, *, encoding: str | None, on_progress: OnProgress | None = None) -> Iterator[str]:
    """Decoded text in order. A CR at the end of a block waits for the next one, so CRLF is never cut in two."""
    head = stream.read(CHUNK_BYTES)
    codec, skip = choose_codec(head, encoding, stream.origin)
    decoder = codecs.getincrementaldecoder(codec)("strict")
    offset, chunk, held = skip, head[skip:], ""
    while True:
        final = not chunk
        fault: UnreadableText | None = None
        try:
            text = decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            start = offset + len(chunk) - len(error.object) + error.start
            text = error.object[: error.start].decode(codec, "replace")
            fault = _describe(error, start, codec)
        text = held + text
        held = ""
        nul = text.find("\0")
        if nul >= 0:
            text, fault = text[:nul], describe_nul(text)
        if text.endswith("\r") and not final and fault is None:
            text, held = text[:-1], "\r"
        if text:
            yield text
        if fault is not None:
            raise fault
        if on_progress is not None:
            on_progress(stream.bytes_in, stream.size)
        if final:
            return
        offset += len(chunk)
        chunk = stream.read(CHUNK_BYTES)


def check_encoding(encoding: str | None) -> str | None:
    """The codec's own name; an unknown one is a ConfigError."""
    if encoding is None:
        return None
    try:
        "".encode(encoding)  # refuses codecs that are not text encodings (hex, zlib) as well as unknown names
        return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        fix = "Common ones: utf-8, utf-16, cp1252, latin-1, shift_jis, gb18030."
        raise ConfigError(f"--encoding {encoding!r} is not known", fix=fix) from None


def choose_codec(head: bytes, encoding: str | None, origin: str) -> tuple[str, int]:
    asked = check_encoding(encoding)
    for mark, codec in _MARKS:
        if head.startswith(mark):
            if asked is not None and not codec.startswith(_WITHOUT_MARK.get(asked, asked).rsplit("-", 1)[0]):
                problem = f"starts with a byte order mark of {codec}, but --encoding is {encoding}"
                raise DataError(problem, where=origin, fix="Omit --encoding.")
            return codec, len(mark)
    if asked is None:
        return "utf-8", 0
    return _WITHOUT_MARK.get(asked, asked), 0


def _describe(error: UnicodeDecodeError, start: int, codec: str) -> UnreadableText:
    bad = error.object[error.start : error.start + 1]
    if error.start + 4 > len(error.object) and error.reason in ("unexpected end of data", "truncated data"):
        problem = f"the file ends inside a character (byte offset {start}, 0x{bad.hex()}): it is truncated"
        return UnreadableText(problem, "Copy the file again.")
    problem = f"byte 0x{bad.hex()} at byte offset {start} is not {codec} ({error.reason})"
    if codec != "utf-8":
        return UnreadableText(problem, "Set the right --encoding.")
    guess, text = guess_encoding(bytes(error.object))
    return UnreadableText(problem, f"Set --encoding {guess} if {text!r} is the right text, or save the file as UTF-8.")


def describe_nul(text: str) -> UnreadableText:
    """The error for text with a NUL character."""
    if text.count("\0") * 3 > len(text):
        codec = "utf-16-be" if text.startswith("\0") else "utf-16-le"
        return UnreadableText(
            "a NUL character", f"It looks like UTF-16 without a byte order mark: set --encoding {codec}."
        )
    return UnreadableText("a NUL character", "Remove it; the file may be damaged.")


def guess_encoding(head: bytes) -> tuple[str, str]:
    """The likely codec, and a few words of the first line with such bytes, decoded with it."""
    codec = _guess(head)
    line = next((part for part in head.splitlines() if not part.isascii()), b"")
    at = next((k for k, byte in enumerate(line) if byte > 127), 0)
    text = line.decode(codec, "replace")
    start = len(line[:at].decode(codec, "replace"))
    begin = max(text.rfind(mark, 0, start) for mark in ' ,;\t"') + 1
    return codec, text[begin : begin + 24].strip()


def _guess(head: bytes) -> str:
    high = sum(byte > 127 for byte in head)
    letters = sum(65 <= byte <= 90 or 97 <= byte <= 122 for byte in head)
    if high * 2 < letters:  # Latin letters with some accents
        western, central = (_letters(head, codec) for codec in ("cp1252", "cp1250"))
        return "cp1250" if central > western else "cp1252"
    try:
        from charset_normalizer import from_bytes

        best = from_bytes(head).best()
    except ImportError:
        best = None
    return str(best.encoding) if best is not None else "cp1252"


def _letters(head: bytes, codec: str) -> int:
    """How many characters outside ASCII are lower-case letters."""
    text = head.decode(codec, "replace")
    return sum(char.isalpha() and char.islower() for char in text if ord(char) > 127)
