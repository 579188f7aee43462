"""A second process of a command: it reads the data while this one loads torch, and draws the pages at the end.

It is forked before torch is loaded and before there are threads, so it starts at once. It ends with the command, however that
ends. What it cannot do is done here.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from tunesmith.cli.late_modules import loading
from tunesmith.errors import TunesmithError
from tunesmith.pipeline.watch import ShowProgress, SideWork


class SideProcess(SideWork):
    """`modules` are loaded here while the first job is done there; `theirs` are loaded there while that is made."""

    def __init__(self, modules: Sequence[str] = (), theirs: Sequence[str] = ()) -> None:
        self._modules = list(modules)
        self._theirs = theirs
        self._pipe: Connection | None = None
        self._child = 0
        self._started = 0

    def __enter__(self) -> SideProcess:
        alone = threading.active_count() == 1 and "torch" not in sys.modules
        if alone and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:
            self._fork()
        return self

    def _fork(self) -> None:
        self._pipe, theirs = Pipe()
        alive, self._alive = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            self._pipe.close()
            os.close(self._alive)
            _do_jobs(theirs, alive, self._theirs)
        theirs.close()
        os.close(alive)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe = None
        if self._child:
            os.kill(self._child, signal.SIGKILL)  # it is idle, or at work for a command that has failed
            os.waitpid(self._child, 0)
            os.close(self._alive)
            self._child = 0

    def start(self, job: Callable[..., Any], *args: Any, progress: ShowProgress | None = None) -> Callable[[], Any]:
        """Sends the job over; the function that is given back waits for its result, or does the job."""
        here = super().start(job, *args, progress=progress)
        if self._pipe is None:
            return here
        try:
            self._pipe.send((job, args, progress is not None))
        except Exception:  # the process is gone, or the job cannot be sent
            return here
        self._started += 1
        number = self._started
        return lambda: self._wait(number, progress, here)

    def _wait(self, number: int, progress: ShowProgress | None, here: Callable[[], Any]) -> Any:
        loader = threading.Thread(target=self._load, name="loading libraries", daemon=True)
        loader.start()
        try:
            kind, value = self._receive(number, progress)
        except (OSError, EOFError):  # it was killed, maybe for its memory
            self._pipe = None
            kind, value = "again", None
        if kind == "error":  # told at once, whatever is still being loaded
            raise value
        loader.join()
        return value if kind == "done" else here()

    def _receive(self, number: int, progress: ShowProgress | None) -> tuple[str, Any]:
        assert self._pipe is not None
        while True:
            of, kind, value = self._pipe.recv()
            if of == number and kind != "progress":
                return kind, value
            if of == number and progress is not None:
                progress(*value)

    def _load(self) -> None:
        """Loads the modules; what cannot be loaded is reported where the command itself imports it."""
        if self._modules:
            with loading(), suppress(Exception):
                while self._modules:
                    import_module(self._modules.pop(0))


def _do_jobs(pipe: Connection, alive: int, modules: Sequence[str]) -> None:
    """The other process: one job after the other, to the end of the command."""
    try:
        gc.set_threshold(200_000)  # what is imported stays: 0.4 s of walks over it
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
        threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
        number = 0
        with suppress(Exception):
            for name in modules:
                import_module(name)
        while True:
            job, args, told = pipe.recv()
            number += 1
            try:
                pipe.send((number, *_do(job, args, pipe if told else None, number)))
            except Exception:  # a result that cannot be sent
                pipe.send((number, "again", None))
    finally:
        os._exit(0)


def _do(job: Callable[..., Any], args: Sequence[Any], pipe: Connection | None, number: int) -> tuple[str, Any]:
    def tell(*what: Any) -> None:
        assert pipe is not None
        pipe.send((number, "progress", what))

    try:
        return "done", job(*args, **({} if pipe is None else {"progress": tell}))
    except TunesmithError as error:
        return "error", error
    except Exception:  # the command does it again, and shows the error with its traceback
        return "again", None


def _end_with(alive: int) -> None:
    """Ends this process when the other end of the pipe is closed: the command has ended, or was killed."""
    os.read(alive, 1)
    os._exit(0)
