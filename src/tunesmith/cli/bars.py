"""How progress bars look, and how sizes and times are written."""

from __future__ import annotations

from typing import Any

_ENDS = "{desc} {percentage:3.0f}% |{bar}| "

TRAINING_BAR: dict[str, Any] = {
    "unit": " step",
    "bar_format": _ENDS + "{n_fmt}/{total_fmt}  {rate_fmt}  {remaining} left{postfix}",
    "smoothing": 0.05,
}
BAR: dict[str, Any] = {"unit": " rows", "bar_format": _ENDS + "{n:,}/{total:,} rows  {rate_fmt}  {remaining} left"}
BYTES: dict[str, Any] = {
    "unit": "B",
    "unit_scale": True,
    "bar_format": _ENDS + "{n_fmt}/{total_fmt}  {rate_fmt}  {remaining} left",
}


def format_duration(seconds: float) -> str:
    """`12s`, `3m05s`, `2h07m`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def format_bytes(count: float) -> str:
    """`812 B`, `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
