"""HTTP with deadlines. uvicorn waits for a slow client as long as it likes; here headers, and answers unread, have a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""From the connection, or the end of the last answer, to the end of the request's headers, in all."""
UNREAD_SECONDS = 30.0
"""How long an answer may lie unread before the connection is dropped."""
REQUEST_SECONDS = 120.0
"""From the headers to the end of the body: a body that is not read (a refused request's) must not keep a connection."""
MAX_CONNECTIONS = 800
"""Below the usual 1,024 open files of a process."""


class DeadlineProtocol(H11Protocol):
    """uvicorn's h11 protocol with three timers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._start("header", HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets all timers."""
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Ends the wait for headers once they are complete."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop("header")
        if self.conn.their_state is h11.SEND_BODY:
            self._start("request", REQUEST_SECONDS, again=False)
        else:
            self._stop("request")

    def on_response_complete(self) -> None:
        """Starts the wait for the next request."""
        self._start("header", HEADER_SECONDS)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read: a deadline starts."""
        super().pause_writing()
        self._start("unread", UNREAD_SECONDS)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self._stop("unread")

    def _start(self, name: str, seconds: float, *, again: bool = True) -> None:
        if name in self._timers and not again:
            return
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
