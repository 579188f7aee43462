"""Lengths of time as a person writes them: 90s, 20m, 2h, 1h30m."""

from __future__ import annotations

import re

_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECONDS = (86400.0, 3600.0, 60.0, 1.0)


def read_duration(text: str) -> float:
    """Seconds. A ValueError says how to write it."""
    match = _PARTS.fullmatch(text.strip().lower())
    seconds = sum(float(n or 0) * unit for n, unit in zip(match.groups(), _SECONDS, strict=True)) if match else 0.0
    if not 0 < seconds < 10**9:
        raise ValueError(f"{text!r} is no length of time. Write 90s, 20m, 2h or 1h30m")
    return seconds
