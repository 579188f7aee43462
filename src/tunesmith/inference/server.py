"""The HTTP server of the board and the prediction service: access control, deadlines for slow clients, and uvicorn.

Every request passes `Guard` first. It checks the Host header (DNS rebinding gets status 421), the token, and the same Origin for
every method except GET and HEAD. Responses have a content security policy without inline scripts and are never framed, cached
or readable across origins.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import multiprocessing
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.supervisors import Multiprocess

from tunesmith.errors import ResourceError, StoppedBySignal, TunesmithError, WorkerError
from tunesmith.files import replacing

HEADER_SECONDS = 10.0
"""Time for the headers of a request, from the connection or the end of the previous response."""
UNREAD_SECONDS = 30.0
"""Time a client may leave a response unread before its connection is dropped."""
BODY_SECONDS = 30.0
MAX_BODY_BYTES = 1_000_000
MAX_CONNECTIONS = 800
"""Further requests get status 503. It is below the usual limit of 1,024 open files."""
DRAIN_SECONDS = 8
ARRIVED_SECONDS = 0.2
"""Time between a signal and the end of listening, in which requests that were already sent are accepted."""
RETRY_SECONDS = 2
LOCAL = ("127.0.0.1", "localhost", "::1")
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": POLICY,
}
READING = ("GET", "HEAD")
_MAX_AGE = 30 * 24 * 3600


class Service:
    """An application to serve: the board, or one model."""

    token_hint = "send the token"
    """The error message for a client without the token."""

    def routes(self) -> list[Route]:
        """Return all routes."""
        raise NotImplementedError

    def start(self) -> None:
        """Prepare; called once before the first request."""

    def close(self) -> None:
        """End streams, so that the server can stop."""


@dataclass(frozen=True)
class Listen:
    """The address to serve, the token, and additional host names to accept."""

    host: str
    port: int
    token: str
    names: Sequence[str] = ()
    drain_seconds: int = DRAIN_SECONDS


# Access


@dataclass(frozen=True, slots=True)
class Access:
    """Who has access. `hosts` are the accepted Host headers, `hint` is the message for a client without the token."""

    token: str
    hosts: frozenset[str]
    cookie: str
    hint: str

    @classmethod
    def for_port(cls, token: str, port: int, names: Iterable[str] = (), hint: str = "send the token") -> Access:
        """Return the access rules for the local names and `names`, at this port."""
        every = [*LOCAL_NAMES, *(n.lower() for n in names)]
        hosts = {f"{name}:{port}" for name in every} | ({*every} if port == 80 else set())
        # Browsers ignore the port of a cookie, so the name separates two boards on one machine.
        return cls(token, frozenset(hosts), f"tunesmith-{port}", hint)

    def knows(self, given: str | None) -> bool:
        """Return whether this is the token, compared in constant time."""
        return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


class Guard:
    """ASGI middleware that refuses requests before they reach the app, and stops the header deadline while one is handled."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. There are no WebSockets: uvicorn refuses them."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        deadline: Deadline = scope.get("state", {}).get("deadline") or Deadline()
        deadline.cancel()
        try:
            await (self._refuse(Request(scope)) or self.app)(scope, receive, send_with_headers)
        finally:
            deadline.start(HEADER_SECONDS)

    def _refuse(self, request: Request) -> Response | None:
        """Return a refusal, or the redirect that turns a token in the URL into a cookie; None to let the request pass."""
        headers, scope = request.headers, request.scope
        host = headers.get("host", "").lower()
        # The address of the connection itself cannot be a rebound name.
        own = address_of(*(scope.get("server") or ("", 0))).removeprefix("http://")
        if len(headers.getlist("host")) != 1 or (host not in self.access.hosts and host != own):
            reason = "this is not an address of the server; use the one it printed, or start it with --allow_host"
            return _refusal(headers, 421, reason)
        reading = request.method in READING
        if reading and "token" in request.query_params:
            return self._login(request)
        bearer = headers.get("authorization", "").removeprefix("Bearer ") or None
        if not self.access.knows(bearer) and not self.access.knows(request.cookies.get(self.access.cookie)):
            return _refusal(headers, 401, self.access.hint)
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if reading:
            page = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
            return _refusal(headers, 403, "cross-site requests are not allowed") if foreign and not page else None
        # A foreign page can make the browser send a cookie, but not an Authorization header.
        origin = headers.get("origin")
        same = origin == f"{scope['scheme']}://{host}" or (origin is None and self.access.knows(bearer))
        return _refusal(headers, 403, "only pages of this server may do this") if foreign or not same else None

    def _login(self, request: Request) -> Response:
        if not self.access.knows(request.query_params["token"]):
            return _refusal(request.headers, 401, "the token in this address is wrong or no longer valid")
        rest = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
        place = "/" + request.scope["raw_path"].decode("latin-1").lstrip("/\\")  # never //evil.example
        cookie = f"{self.access.cookie}={self.access.token}; Path=/; Max-Age={_MAX_AGE}; HttpOnly; SameSite=Strict"
        location = place + (f"?{rest}" if rest else "")
        return Response(status_code=303, headers={"location": location, "set-cookie": cookie, "connection": "close"})


def _refusal(headers: Headers, status: int, reason: str) -> Response:
    close = {"connection": "close"}
    if "text/html" not in headers.get("accept", ""):
        return JSONResponse({"error": reason}, status, close)
    said = f"{reason[0].upper()}{reason[1:]}."
    page = f'<!doctype html><html lang="en"><title>tunesmith</title><h1>{status}</h1><p>{said}</p></html>'
    return HTMLResponse(page, status, close)


def token_file() -> Path:
    """Return the file with the board token of this user."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "tunesmith" / "board-token"


def key_file() -> Path:
    """Return the file with the key of the prediction service, which is not valid for the board."""
    return token_file().with_name("serve-key")


def load_token(file: Path | None = None, *, new: bool = False) -> str:
    """Return the token, created on first use; `new` replaces it, which ends the access of all open pages."""
    path = file or token_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not new and path.is_file() and not path.is_symlink():
            info = path.stat()
            known = path.read_text(encoding="ascii", errors="replace").strip()
            # A file that others can read or that belongs to another user is not a secret.
            if len(known) >= 32 and not info.st_mode & 0o077 and info.st_uid == os.getuid():
                return known
        token = secrets.token_urlsafe(32)
        path.unlink(missing_ok=True)  # a link, or one that others could read
        with replacing(path, mode=0o600) as out:
            out.write(token.encode())
    except OSError as error:
        raise ResourceError(
            f"the token cannot be saved ({error.strerror})",
            where=str(path),
            fix="Set XDG_STATE_HOME to a writable folder.",
        ) from None
    return token


# Requests


async def read_json_body(request: Request) -> Any:
    """Return the JSON value in the body, with limits on bytes and seconds whatever the headers say."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "send the body without compression")
    too_large = HTTPException(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > MAX_BODY_BYTES):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise HTTPException(422, "the JSON is nested too deeply") from None
    except ValueError as error:
        raise HTTPException(422, f"not JSON: {str(error)[:100]}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def retry_later(status: int, reason: str) -> HTTPException:
    """Return an error that asks the client to try again."""
    return HTTPException(status, reason, {"retry-after": str(RETRY_SECONDS)})


def _respond_error(request: Request, error: Exception) -> Response:
    """Return a JSON response for an HTTPException, or for an error of this package."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    return JSONResponse({"error": str(error)}, 409)


# Slow clients


class Deadline:
    """Aborts a connection unless a request starts in time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Start the time again."""
        self.cancel()
        if self.transport is not None and not self.transport.is_closing():
            self._timer = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def cancel(self) -> None:
        """Stop the time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class DeadlineProtocol(H11Protocol):
    """uvicorn's protocol with deadlines. Only the callbacks of asyncio.Protocol are extended.

    The deadline for headers is part of the state that uvicorn passes to the app, so `Guard` can stop it.
    """

    def __init__(self, *, app_state: dict[str, Any], **options: Any) -> None:
        self._headers, self._unread = Deadline(), Deadline()
        super().__init__(app_state={**app_state, "deadline": self._headers}, **options)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for the first request."""
        super().connection_made(transport)
        self._headers.transport = self._unread.transport = transport
        self._headers.start(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all deadlines."""
        self._headers.cancel()
        self._unread.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the deadline for a client that doesn't read its response."""
        super().pause_writing()
        self._unread.start(UNREAD_SECONDS)

    def resume_writing(self) -> None:
        """Cancel the deadline: the client reads."""
        super().resume_writing()
        self._unread.cancel()


# Server


def make_app(service: Service, access: Access) -> ASGIApp:
    """Return the guarded ASGI app of a service."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        service.start()
        yield
        service.close()

    handlers: Any = dict.fromkeys((HTTPException, TunesmithError), _respond_error)
    app = Starlette(routes=service.routes(), lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, access)


class Server(uvicorn.Server):
    """uvicorn's server, which ends endless streams before it shuts down."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then wait for requests in progress."""
        self._service.close()
        await asyncio.sleep(ARRIVED_SECONDS)
        await super().shutdown(sockets)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise a ResourceError if the port is in use."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(1024)  # before the address is printed, so that a client can connect immediately
    except (OSError, OverflowError) as error:
        found.close()
        raise ResourceError(
            f"cannot listen ({getattr(error, 'strerror', None) or error})",
            where=f"{host}:{port}",
            fix="Set a different --port, or 0 for any free one.",
        ) from None
    return found


def make_server(service: Service, listener: socket.socket, listen: Listen) -> Server:
    """Return the server of a service for a bound socket."""
    app = partial(make_app, service, _access(service, listener, listen))
    return Server(_config(app, listen), service)


def serve_forever(service: Service, listen: Listen, on_ready: Callable[[str], Any]) -> None:
    """Serve until a signal, then finish accepted requests. `on_ready` receives the address without the token.

    Raises KeyboardInterrupt after SIGINT and StoppedBySignal after SIGTERM.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_stopped)  # uvicorn raises the signal again after its shutdown
    with open_socket(listen.host, listen.port) as listener:
        server = make_server(service, listener, listen)
        on_ready(address_of(listen.host, listener.getsockname()[1]))
        server.run(sockets=[listener])


def serve_with_workers(
    make_service: Callable[[], Service], workers: int, listen: Listen, on_ready: Callable[[str], Any]
) -> None:
    """Serve with several processes at one port. uvicorn restarts a worker that dies. `make_service` must be picklable."""
    service = make_service()  # an unusable model is reported before the workers start
    with open_socket(listen.host, listen.port) as listener, tempfile.TemporaryDirectory() as counters:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counters  # prometheus_client reads it when a worker imports it
        access = _access(service, listener, listen)
        on_ready(address_of(listen.host, listener.getsockname()[1]))
        supervisor = _Supervisor(_config(partial(_worker_app, make_service, access), listen, workers), [listener])
        supervisor.run()
    if supervisor.stopped_by is None:
        raise WorkerError("a worker could not start", fix="Run with --workers 1 to see the reason.")
    _raise_stopped(supervisor.stopped_by)


class _Supervisor(Multiprocess):
    """uvicorn's supervisor, which remembers the signal that stopped it."""

    stopped_by: int | None = None

    def handle_int(self) -> None:
        """Stop after Ctrl-C."""
        self.stopped_by = signal.SIGINT
        super().handle_int()

    def handle_term(self) -> None:
        """Stop after SIGTERM."""
        self.stopped_by = signal.SIGTERM
        super().handle_term()


def _worker_app(make_service: Callable[[], Service], access: Access) -> ASGIApp:
    """Create the app in a worker process, which ends when its parent is gone, however that ended."""

    def watch(parent: Any) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, args=(multiprocessing.parent_process(),), daemon=True).start()
    return make_app(make_service(), access)


def _config(app: Callable[[], ASGIApp], listen: Listen, workers: int = 1) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        factory=True,
        workers=workers,
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
        timeout_graceful_shutdown=listen.drain_seconds,
        timeout_worker_healthcheck=60,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=16_384,
        backlog=1024,
    )


def _access(service: Service, listener: socket.socket, listen: Listen) -> Access:
    host = listen.host
    names = list(listen.names)
    if host in ("0.0.0.0", "::"):
        names += [socket.gethostname(), socket.getfqdn()]
    elif host not in LOCAL:
        names.append(f"[{host}]" if ":" in host else host)
    port = int(listener.getsockname()[1])
    return Access.for_port(listen.token, port, names, service.token_hint)


def _raise_stopped(number: int, frame: object = None) -> None:
    raise StoppedBySignal(number, "after all accepted requests were answered")


def address_of(host: str, port: int) -> str:
    """Return the address to open on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
