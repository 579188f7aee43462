"""Contestants in processes of their own take turns on one machine; what comes back is one table."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.errors import WorkerError, short_text
from tunesmith.runs.writing import create

_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Unsupported|Failed)\b")
CONTESTANTS = {
    "tunesmith": "tunesmith",
    "trainer": "Trainer, its defaults",
    "trainer_grouped": "Trainer, length grouping",
    "trainer_bf16": "Trainer, length grouping, bf16",
    "trainer_compiled": "Trainer, its best, compiled",
    "loop": "plain PyTorch loop",
}
"""Kind -> the name in the table."""


def kinds_for(*, on_gpu: bool, half: bool) -> tuple[str, ...]:
    """Who runs beside us when no peer is named: on a GPU the Trainer's best as well. `half`: bf16 or fp16 was asked for.

    The Trainer takes the precision that was asked for, so that one more with bf16 says something new without it only. On
    a CPU bf16 and compiling are left to those who name them.
    """
    best = (() if half else ("trainer_bf16",)) + ("trainer_compiled",) if on_gpu else ()
    return ("trainer", "trainer_grouped", *best, "loop")


@dataclass(frozen=True)
class Turn:
    """Some steps of one contestant: seconds, rows and real tokens of all of them."""

    seconds: float
    rows: int
    tokens: int


@dataclass
class Result:
    """What one contestant did in all its turns."""

    kind: str
    start: float
    """Seconds from the start of the process to the end of its first step; tokens came from the cache."""
    turns: list[Turn] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str | None = None
    """Why it did not run, or did not run to the end."""

    def per_step(self, steps: int) -> float:
        """Median seconds of a step."""
        return statistics.median(turn.seconds / steps for turn in self.turns)

    def per_second(self, what: str) -> float:
        """Median rows or tokens a second."""
        return statistics.median(float(getattr(turn, what)) / turn.seconds for turn in self.turns)


class Contestant:
    """A process that waits for its turn: one JSON line in, one out."""

    def __init__(self, kind: str, options: dict[str, Any], log: Path) -> None:
        self.kind, self._log = kind, log
        self._errors = create(log)
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tunesmith.measure.worker", kind, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.result = Result(kind, time.perf_counter() - began)

    def take_turn(self, steps: int) -> None:
        """Lets it train some steps."""
        answer = self._ask({"steps": steps})
        self.result.turns.append(Turn(answer["seconds"], answer["rows"], answer["tokens"]))
        self.result.peak_bytes = answer["peak_bytes"]

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died() from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found = json.loads(line)
            except ValueError:  # a library's own print
                continue
            if isinstance(found, dict) and found.get("bench") == self.kind:
                return found
        raise self._died()

    def _died(self) -> WorkerError:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return WorkerError(
            f"{CONTESTANTS[self.kind]} ended with {code}: {last_words(lines)[:300]}", where=str(self._log)
        )


def last_words(lines: Sequence[str]) -> str:
    """The line of a traceback that names the error: it begins with a class; what follows explains it at length."""
    named = [line for line in lines if _ERROR.match(line)]
    return named[-1] if named else lines[-1] if lines else "no word"


def run_contest(
    options: dict[str, Any],
    *,
    kinds: Sequence[str],
    rounds: int,
    steps: int,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Starts the contestants one after the other, then lets them take turns; the one that begins changes each round.

    One that fails is out, and its result says why; without the first there is nothing to compare with, and it is an error.
    """
    racing: list[Contestant] = []
    results: dict[str, Result] = {}

    def is_out(kind: str, error: WorkerError) -> None:
        if kind == kinds[0]:
            raise error
        reason = error.problem.removeprefix(f"{CONTESTANTS[kind]} ")
        results[kind] = Result(kind, 0.0, failure=reason)
        say(f"{CONTESTANTS[kind]} did not run: {reason}")

    try:
        for kind in kinds:
            say(f"starting {CONTESTANTS[kind]}")
            try:
                racing.append(Contestant(kind, options, folder / f"{kind}.log"))
            except WorkerError as error:
                is_out(kind, error)
        for number in range(rounds):
            for one in racing[number % len(racing) :] + racing[: number % len(racing)]:
                if one.kind in results:
                    continue
                try:
                    one.take_turn(steps)
                except WorkerError as error:
                    is_out(one.kind, error)
                    continue
                say(f"round {number + 1} of {rounds}: {CONTESTANTS[one.kind]} {one.result.turns[-1].seconds:.1f} s")
        done = {one.kind: one.result for one in racing} | results
        return [done[kind] for kind in kinds]
    finally:
        for one in racing:
            try:
                one.close()
            except OSError as error:
                say(short_text(error))
