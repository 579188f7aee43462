"""Runs a service: bind, print the address, serve its guarded routes until a signal, end all streams, stop; and the protocol that
gives a slow client a limited time.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunesmith.errors import ConfigError, ResourceError, StoppedBySignal
from tunesmith.inference.board import Board
from tunesmith.inference.runs import RunIndex
from tunesmith.inference.security import Access, Guard

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


DRAIN_SECONDS = 8
BACKLOG = 1024
ARRIVED_SECONDS = 0.2
"""Seconds between the signal and the end of listening, in which requests that were already sent are accepted."""
LOCAL = ("127.0.0.1", "localhost", "::1")


class Service(Protocol):
    """What can be served: the board, or one model."""

    how: str
    """The answer to a client without the token."""

    def routes(self) -> list[Route]:
        """All its routes."""

    async def close(self) -> None:
        """Ends the streams that have no end of their own."""

    def stop(self) -> None:
        """Ends its threads."""


def make_app(service: Service, access: Access) -> Guard:
    """The guarded app."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await service.close()
        service.stop()

    plain = {404: "there is nothing here", 405: "not with this method"}
    handlers = {status: _plain_answer(status, reason) for status, reason in plain.items()}
    app = Starlette(routes=service.routes(), lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, access)


def _plain_answer(status: int, reason: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": reason}, status, headers=getattr(error, "headers", None))

    return answer


class Server(uvicorn.Server):
    """uvicorn, with endless streams closed before it shuts down."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the streams of watching pages, then waits for the requests that are being answered."""
        await self._service.close()
        await asyncio.sleep(ARRIVED_SECONDS)
        await super().shutdown(sockets)


def open_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; a ResourceError when the port is taken. `shared`: other workers listen at the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((host, port))
        found.listen(BACKLOG)  # before the address is printed: a client may come before the server is up
    except (OSError, OverflowError) as error:
        found.close()
        raise ResourceError(
            f"cannot listen ({getattr(error, 'strerror', None) or error})",
            where=f"{host}:{port}",
            fix="Give another --port, or 0 for any free one.",
        ) from None
    return found


def make_board(runs: str | Path) -> Board:
    """The board of a folder of runs."""
    folder = Path(runs)
    if not folder.is_dir():
        raise ConfigError(
            "there is no such folder", where=str(runs), fix="Give the folder that holds your run folders."
        )
    return Board(RunIndex(folder))


def make_server(
    service: Service,
    *,
    listener: socket.socket,
    token: str,
    names: Sequence[str] = (),
    drain_seconds: int = DRAIN_SECONDS,
) -> Server:
    """The server of a service, for a socket that is bound already."""
    config = uvicorn.Config(
        make_app(service, Access.for_port(token, int(listener.getsockname()[1]), names, service.how)),
        http=DeadlineProtocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        access_log=False,
        log_level="error",
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=drain_seconds,
        h11_max_incomplete_event_size=16_384,
        backlog=BACKLOG,
    )
    return Server(config, service)


def serve_forever(
    service: Service,
    *,
    host: str,
    port: int,
    token: str,
    names: Sequence[str] = (),
    on_ready: Callable[[str], Any] = lambda address: None,
    drain_seconds: int = DRAIN_SECONDS,
    shared: bool = False,
) -> None:
    """Serves until a signal, then answers what was accepted; `on_ready` gets the address without the token.

    Ends with KeyboardInterrupt after SIGINT and with StoppedBySignal after SIGTERM.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, raise_stopped)  # uvicorn sends itself the signal again when all is answered
    with open_socket(host, port, shared=shared) as listener:
        every = [*names, *_names_of(host)]
        server = make_server(service, listener=listener, token=token, names=every, drain_seconds=drain_seconds)
        on_ready(address_of(host, listener.getsockname()[1]))
        server.run(sockets=[listener])


def raise_stopped(number: int, frame: object = None) -> None:
    """Ends a service after a signal: exit code 128 + its number, with one worker and with several."""
    raise StoppedBySignal(number, "after what was accepted was answered")


def address_of(host: str, port: int) -> str:
    """The address to open on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _names_of(host: str) -> list[str]:
    """The names of a server that the network can reach."""
    if host in LOCAL:
        return []
    if host in ("0.0.0.0", "::"):
        return [socket.gethostname(), socket.getfqdn()]
    return [f"[{host}]" if ":" in host else host]
