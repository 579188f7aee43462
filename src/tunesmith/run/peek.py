"""A few facts of a journal from its first and last kilobytes: what a list of hundreds of runs can afford to read.

The whole of a journal of a million lines takes seconds; this takes about a millisecond whatever the length.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tunesmith.errors import CheckpointError
from tunesmith.events import Diagnosed, Evaluated, Event, RunEnded, RunStarted, StepDone
from tunesmith.files import BadFile, open_plain
from tunesmith.run.reader import MAX_LINE, decode_line

HEAD, TAIL, FAR_TAIL = 4096, 32_768, 2_000_000
SPARK_POINTS = 40
_LOSS = re.compile(rb'"event": "StepDone", [^\n]{,400}?"loss": (-?\d{1,20}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,3})?),')
_STEP = b'{"event": "StepDone"'
_EVALUATED = b'{"event": "Evaluated"'
Kind = TypeVar("Kind", bound=Event)


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
    problem: str | None = None
    """What is damaged, as far as this was read."""


def peek_journal(path: Path) -> Peek:
    """The facts; an absent journal has none, an unreadable one a problem."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD)
            tail = _read_end(file.fileno(), size, TAIL)
            far = b"" if _EVALUATED in tail or size <= TAIL else _read_end(file.fileno(), size, FAR_TAIL)
            spark = _sample_losses(file.fileno(), size)
            endless = size > MAX_LINE and b"\n" not in os.pread(file.fileno(), MAX_LINE, size - MAX_LINE)
    except OSError:
        return Peek()
    except BadFile as error:
        return Peek(problem=f"{path.name} {error}")
    problems = [f"its last line has more than {MAX_LINE:,} bytes"] if endless else []
    first = _decoded(head[: head.rfind(b"\n") + 1].split(b"\n")[:1], problems)
    started = _newest(first, RunStarted)
    lines = _whole_lines(tail, size > TAIL) or _whole_lines(far, size > FAR_TAIL)
    last = _decoded(_newest_lines(lines), problems)
    evaluated = next((e for e in last if isinstance(e, Evaluated) and e.split == "validation"), None)
    if evaluated is None and _EVALUATED in far:
        found = _decoded([far[far.rfind(_EVALUATED) :].split(b"\n", 1)[0]], problems)
        evaluated = _newest(found, Evaluated)
    step, diagnosed = _newest(last, StepDone), _newest(last, Diagnosed)
    end = next((e for e in last if not (isinstance(e, Evaluated) and e.split != "validation")), None)
    return Peek(
        num_steps=max(0, started.num_steps) if started else 0,
        step=step.step if step else 0,
        started=started.time if started else None,
        ended=end.reason if isinstance(end, RunEnded) else None,
        loss=step.loss if step else None,
        score=_score(evaluated.metrics) if evaluated else None,
        verdict=str(diagnosed.finding["code"]) if diagnosed and "code" in diagnosed.finding else None,
        spark=spark,
        problem=problems[0] if problems else None,
    )


def _read_end(handle: int, size: int, count: int) -> bytes:
    data = os.pread(handle, count, max(0, size - count))
    return data[: data.rfind(b"\n") + 1]


def _whole_lines(tail: bytes, is_part: bool) -> list[bytes]:
    """The lines; the first of a part may be the second half of one."""
    return [line for line in tail.split(b"\n")[1 if is_part else 0 :] if line]


def _newest_lines(lines: list[bytes]) -> list[bytes]:
    """From the last line back; of the steps only the newest, which begins as we write it."""
    steps = [line for line in lines if line.startswith(_STEP)]
    return [line for line in reversed(lines) if not line.startswith(_STEP) or line is steps[-1]]


def _decoded(lines: list[bytes], problems: list[str]) -> list[Event]:
    found = []
    for line in lines:
        try:
            event = decode_line(line, where="") if line else None
        except CheckpointError as error:
            problems.append(error.problem)
        else:
            found += [event] if event is not None else []
    return found


def _newest(events: list[Event], kind: type[Kind]) -> Kind | None:
    return next((e for e in events if isinstance(e, kind)), None)


def _score(metrics: dict[str, float | None]) -> tuple[str, float] | None:
    for name in ("accuracy", "f1", "f1_macro", "f1_micro", "pearson", *sorted(metrics)):
        value = metrics.get(name)
        if name != "loss" and value is not None:
            return name, value
    return None


def _sample_losses(handle: int, size: int) -> tuple[float, ...]:
    if size <= 65_536:
        every = [m.group(1) for m in _LOSS.finditer(os.pread(handle, size, 0))]
        chosen = every[:: max(1, len(every) // SPARK_POINTS)]
    else:
        found = (_LOSS.search(os.pread(handle, 1024, k * size // SPARK_POINTS)) for k in range(SPARK_POINTS))
        chosen = [m.group(1) for m in found if m]
    return tuple(value for text in chosen if abs(value := float(text)) < 1e30)
