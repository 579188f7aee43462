"""Texts tokenized by processes of their own, so that all cores feed one GPU.

The Rust core has threads, but in one process they share one allocator and one address space: 16 cores gave 5,100 rows of MRPC a
second, processes 29,800 (docs/research/performance.md). A process gets texts and returns arrays. Pieces go to whichever process is idle
and come back in their order; the tokens are those of the encoder in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.token_encoder import TokenEncoder
from tunesmith.data.token_rows import Ragged, TokenRows
from tunesmith.data.truncation import CutCount, EncodedRow
from tunesmith.errors import WorkerError

EncodedRows = tuple[TokenRows, npt.NDArray[np.int32]]
"""Rows, and of each how many tokens were cut, how many of them from its second text, and whether its end is unread."""


def make_token_rows(encoded: Sequence[EncodedRow], *, has_types: bool) -> TokenRows:
    """The rows as arrays."""
    columns = {"input_ids": Ragged.from_lists([row.ids for row in encoded])}
    if has_types:
        columns["token_type_ids"] = Ragged.from_lists([row.types for row in encoded], np.int8)
    return TokenRows(columns, columns["input_ids"].lengths(), None)


def join_token_rows(parts: Sequence[TokenRows]) -> TokenRows:
    """The rows of all parts, concatenated; only the lengths are copied."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    columns = {}
    for name in parts[0].columns:
        columns[name] = Ragged(tuple(chain.from_iterable(part.columns[name].chunks for part in parts)), starts)
    return TokenRows(columns, np.concatenate([part.lengths for part in parts]), None)


PIECE_ROWS = 256
LEAST_ROWS = 1024
"""Fewer rows are tokenized in this process: starting others would take longer."""
SPARED_CORES = 2
"""One drives the GPU, one makes its batches."""
_PACKAGES = Path(__file__).resolve().parents[2]
_PROGRAM = "import sys; sys.path.append(sys.argv[2]); from tunesmith.data.encoding_processes import work; work()"
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class ChunkEncoder:
    """`encode(texts)` gives token rows and what was cut of them; with `processes`, large chunks are shared among them."""

    def __init__(self, encoder: TokenEncoder, *, has_types: bool, processes: int = 0) -> None:
        self._encoder = encoder
        self._has_types = has_types
        self._count = processes if sys.executable else 0
        self._crew: _Crew | None = None
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[list[str]]) -> tuple[TokenRows, CutCount]:
        """The rows of one or two columns of texts, in their order, and what was cut of all of them."""
        rows, cuts = self.encode_rows(texts)
        return rows, CutCount.of(cuts)

    def encode_rows(self, texts: Sequence[list[str]]) -> EncodedRows:
        """The same with what was cut of each row."""
        if self._count < 1 or len(texts[0]) < LEAST_ROWS:
            return self.encode_here(texts)
        with self._lock:
            if self._crew is None or self._crew.owner != os.getpid():  # after a fork, the pipes are the parent's
                self._crew = _Crew(self._count, self._encoder, self._has_types)
            try:
                return self._share(self._crew, texts)
            except BaseException:  # answers are still on their way: the next call would take them for its own
                self._crew.end()
                self._crew = None
                raise

    def encode_here(self, texts: Sequence[list[str]]) -> EncodedRows:
        """The same in this process."""
        encoded = self._encoder.encode(texts)
        cuts = np.array([(row.cut, row.cut_second, row.unread) for row in encoded], dtype=np.int32).reshape(-1, 3)
        return make_token_rows(encoded, has_types=self._has_types), cuts

    def _share(self, crew: _Crew, texts: Sequence[list[str]]) -> EncodedRows:
        """Sends pieces to idle processes; while all of them are still starting, encodes pieces here."""
        starts = range(0, len(texts[0]), PIECE_ROWS)
        todo = deque((n, [column[at : at + PIECE_ROWS] for column in texts]) for n, at in enumerate(starts))
        found: dict[int, EncodedRows] = {}
        while len(found) < len(starts):
            crew.give(todo)
            if crew.busy:
                found.update(crew.take())
            elif todo:
                number, piece = todo.popleft()
                found[number] = self.encode_here(piece)
        parts = [found[n] for n in range(len(starts))]
        return join_token_rows([rows for rows, _ in parts]), np.concatenate([cuts for _, cuts in parts])


class _Crew:
    """The worker processes. They end when their pipe is closed: with this object, or with the process that owns it."""

    def __init__(self, count: int, encoder: TokenEncoder, has_types: bool) -> None:
        self.owner = os.getpid()
        started = [_start() for _ in range(count)]
        self.starting: list[Connection] = [pipe for pipe, _ in started]
        self.idle: list[Connection] = []
        self.busy: dict[Connection, int] = {}
        self._settings = (encoder, has_types)
        self.end = weakref.finalize(self, _end, started, self.owner)

    def give(self, todo: deque[tuple[int, list[list[str]]]]) -> None:
        """Sends a piece to each idle process."""
        for pipe in wait(self.starting, timeout=0):
            assert isinstance(pipe, Connection)
            self.starting.remove(pipe)
            try:
                pipe.recv()  # it runs: a send of any size will be read
                pipe.send(self._settings)
                self.idle.append(pipe)
            except (EOFError, OSError):  # it could not start: the others do the work
                pass
        while todo and self.idle:
            pipe, (number, piece) = self.idle.pop(), todo.popleft()
            self.busy[pipe] = number
            try:
                pipe.send(piece)
            except OSError:
                raise self._died(number) from None

    def take(self) -> dict[int, EncodedRows]:
        """The answers that have arrived; waits for one, or for a process to start."""
        found = {}
        for pipe in wait([*self.busy, *self.starting]):
            if not isinstance(pipe, Connection) or pipe not in self.busy:
                continue
            number = self.busy.pop(pipe)
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                raise self._died(number) from None
            if isinstance(answer, BaseException):
                raise answer
            found[number] = answer
            self.idle.append(pipe)
        return found

    def _died(self, number: int) -> WorkerError:
        first = number * PIECE_ROWS + 1
        problem = f"a process that tokenized rows {first} to {first + PIECE_ROWS - 1} of a chunk died"
        how = "--preprocessing_num_workers 1 (train) or threads=1 (Predictor.load) tokenizes in one process"
        return WorkerError(problem, fix=f"Memory may have run out, or a text ended it; {how}.")


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process at the other end of a pipe, in its own process group, so that Ctrl-C reaches the parent only."""
    mine, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(_PACKAGES)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ | _QUIET,
            process_group=0,
        )
    return mine, process


def _end(started: list[tuple[Connection, subprocess.Popen[bytes]]], owner: int) -> None:
    for pipe, _ in started:
        pipe.close()
    for _, process in started if os.getpid() == owner else ():
        process.kill()
        process.wait()


def work() -> None:
    """The main loop of a worker: report that it runs, receive the tokenizer, then encode texts until the pipe is closed."""
    pipe = Connection(int(sys.argv[1]))
    try:
        pipe.send(None)
        encoder, has_types = pipe.recv()
        chunks = ChunkEncoder(encoder, has_types=has_types)
        while True:
            texts = pipe.recv()
            try:
                answer: Any = chunks.encode_here(texts)
            except Exception as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return
