"""Which encoding a text file that is not UTF-8 has: a guess that a person confirms, never one that is followed."""

from __future__ import annotations


def guess_encoding(head: bytes) -> tuple[str, str]:
    """The likely codec, and a few words of the first line that needs it, as they read in it."""
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
    """How many characters that are not ASCII are letters within or at the end of a small word."""
    text = head.decode(codec, "replace")
    return sum(char.isalpha() and char.islower() for char in text if ord(char) > 127)
