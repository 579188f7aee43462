"""A few facts of a journal from its first and last kilobytes: what a list of hundreds of runs can afford to read.

The whole of a journal of a million lines takes seconds; this takes about a millisecond whatever the length.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD, TAIL, FAR_TAIL = 4096, 32_768, 2_000_000
SPARK_POINTS = 40
_LOSS = re.compile(rb'"event": "StepDone", [^\n]*?"loss": ([-+0-9.eE]+|null)')
_STEP = b'{"event": "StepDone"'
_EVALUATED = b'{"event": "Evaluated"'


@dataclass(frozen=True, slots=True)
class Peek:
    """What the ends of a journal tell. `score` is the newest validation score; `spark` a few losses over the whole run."""

    num_steps: int = 0
    step: int = 0
    started: float | None = None
    ended: str | None = None
    loss: float | None = None
    score: tuple[str, float] | None = None
    verdict: str | None = None
    spark: tuple[float, ...] = ()


def peek_journal(path: Path) -> Peek:
    """The facts; an absent or unreadable journal has none."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD)
            tail = _read_end(file.fileno(), size, TAIL)
            far = b"" if _EVALUATED in tail or size <= TAIL else _read_end(file.fileno(), size, FAR_TAIL)
            spark = _sample_losses(file.fileno(), size)
    except OSError:
        return Peek()
    started = next((e for e in map(_parse, head.split(b"\n")[:3]) if e.get("event") == "RunStarted"), {})
    last = _last_events(tail)
    if far:
        last.setdefault(
            "Evaluated", _parse(far[far.rfind(_EVALUATED) :].split(b"\n", 1)[0] if _EVALUATED in far else b"")
        )
    step = last.get("StepDone", {})
    finding = last.get("Diagnosed", {}).get("finding", {})
    return Peek(
        num_steps=_number(started.get("num_steps")) or 0,
        step=int(_number(step.get("step")) or 0),
        started=_number(started.get("time")),
        ended=str(last["end"].get("reason")) if last["end"].get("event") == "RunEnded" else None,
        loss=_number(step.get("loss")),
        score=_score(last.get("Evaluated", {}).get("metrics")),
        verdict=str(finding["code"]) if isinstance(finding, dict) and "code" in finding else None,
        spark=spark,
    )


def _read_end(handle: int, size: int, count: int) -> bytes:
    data = os.pread(handle, count, max(0, size - count))
    return data[: data.rfind(b"\n") + 1]


def _last_events(tail: bytes) -> dict[str, dict[str, Any]]:
    """The newest of each kind of event; "end" is the very last one."""
    found: dict[str, dict[str, Any]] = {}
    lines = tail.split(b"\n")[1 if len(tail) >= TAIL - 1 else 0 :]
    for line in reversed(lines):
        if not line or (line.startswith(_STEP) and "StepDone" in found):
            continue
        event = _parse(line)
        kind = event.get("event")
        if kind == "Evaluated" and event.get("split") != "validation":
            continue
        found.setdefault("end", event)
        if isinstance(kind, str):
            found.setdefault(kind, event)
    found.setdefault("end", {})
    return found


def _parse(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _score(metrics: Any) -> tuple[str, float] | None:
    known = metrics if isinstance(metrics, dict) else {}
    for name in ("accuracy", "f1", "f1_macro", "f1_micro", "pearson", *sorted(map(str, known))):
        if name != "loss" and _number(known.get(name)) is not None:
            return name, float(known[name])
    return None


def _sample_losses(handle: int, size: int) -> tuple[float, ...]:
    if size <= 65_536:
        every = [m.group(1) for m in _LOSS.finditer(os.pread(handle, size, 0))]
        chosen = every[:: max(1, len(every) // SPARK_POINTS)]
    else:
        found = (_LOSS.search(os.pread(handle, 1024, k * size // SPARK_POINTS)) for k in range(SPARK_POINTS))
        chosen = [m.group(1) for m in found if m]
    return tuple(float(v) for v in chosen if v != b"null")
