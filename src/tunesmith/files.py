"""Files from an untrusted source: plain files only, a bounded number of bytes, JSON of bounded depth and plain numbers.

Nothing here waits: a named pipe, a socket or a device is refused without opening it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 64_000_000
"""A JSON file larger than this is not one of a run or a model (the largest tokenizer.json has about 35 MB)."""
MAX_DEPTH = 40
MAX_DIGITS = 18
"""Digits of a whole number: what fits 64 bits."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadFile(ValueError):
    """A file that is there and cannot be used; the text says why, as the end of a sentence that begins with its name."""


def open_plain(path: str | Path, *, follow: bool = False) -> BinaryIO:
    """A plain file, open for reading; anything else is a BadFile. `follow`: a link to a plain file will do."""
    try:
        _require_plain(os.stat(path, follow_symlinks=follow))
        # What was looked at may be replaced before it is opened: O_NONBLOCK lets a pipe come back at once.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        handle = os.open(path, flags)
    except FileNotFoundError:
        if os.path.islink(path):
            raise BadFile("is a link that leads nowhere") from None
        raise
    except (OSError, ValueError) as error:
        raise error if isinstance(error, BadFile) else BadFile(_reason(error)) from None
    try:
        _require_plain(os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def is_plain(path: str | Path) -> bool:
    """Whether this is a plain file: no link, pipe, device or folder."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_plain(path: str | Path, limit: int, *, follow: bool = False) -> bytes:
    """The bytes of a plain file; more than `limit` are a BadFile."""
    with open_plain(path, follow=follow) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
        except OSError as error:
            raise BadFile(_reason(error)) from None
    if size > limit or len(data) > limit:
        raise BadFile(f"is larger than {limit:,} bytes")
    return data


def read_json(path: str | Path, *, limit: int = MAX_JSON_BYTES, follow: bool = False) -> Any:
    """What a JSON file holds, by the rules of `parse_json`."""
    return parse_json(read_plain(path, limit, follow=follow))


def parse_json(data: bytes | str, *, mend: bool = True) -> Any:
    """The value, with None for NaN and infinities; a BadFile for damage, depth and endless numbers.

    `mend` makes half a character "?", so that every text can be printed and written.
    """
    try:
        text = data.decode().removeprefix("\ufeff") if isinstance(data, bytes) else data
        value = _DECODER.decode(text)
    except BadFile:
        raise
    except RecursionError:
        raise BadFile("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadFile(f"is not UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start})") from None
    except ValueError as error:
        raise BadFile(f"is not JSON ({error})") from None
    broken = mend and "\\ud" in text.lower()
    if not broken and text.count("[") + text.count("{") <= MAX_DEPTH:
        return value
    return _checked(value, broken=broken)


def _checked(value: Any, depth: int = 0, *, broken: bool) -> Any:
    if depth > MAX_DEPTH:
        raise BadFile("is nested too deeply")
    if isinstance(value, dict):
        return {_whole_text(k, broken): _checked(v, depth + 1, broken=broken) for k, v in value.items()}
    if isinstance(value, list):
        return [_checked(v, depth + 1, broken=broken) for v in value]
    return _whole_text(value, broken) if isinstance(value, str) else value


def _whole_text(text: str, broken: bool) -> str:
    return _SURROGATE.sub("?", text) if broken else text


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:
        raise BadFile(f"holds a number of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float | None:
    value = float(digits)
    return None if value in (float("inf"), float("-inf")) else value


def _no_number(word: str) -> None:
    """NaN and the infinities."""


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_int=_whole, parse_float=_real)


def _require_plain(info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise BadFile(f"is {_KINDS.get(stat.S_IFMT(info.st_mode), 'something else')}, not a file")


def _reason(error: OSError | ValueError) -> str:
    return f"cannot be read ({getattr(error, 'strerror', None) or error})"
