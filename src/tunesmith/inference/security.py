"""Access control for the board and the prediction service, as ASGI middleware in front of all routes.

Checks, in this order: the Host header (DNS rebinding gets status 421), the token, and the same Origin for every method except
GET and HEAD. Responses have a content security policy without inline scripts and are never framed, cached or readable across
origins.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunesmith.errors import ResourceError
from tunesmith.runs.writing import replacing

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
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
READING = ("GET", "HEAD")
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
BOARD_TOKEN = "open the address that `tunesmith board` printed, which contains the token"
_MAX_AGE = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Access:
    """Who has access. `hosts` are the accepted values of the Host header."""

    token: str
    hosts: frozenset[str]
    cookie: str
    hint: str = BOARD_TOKEN
    """The error message for a client without the token."""

    @classmethod
    def for_port(cls, token: str, port: int, names: Iterable[str] = (), hint: str = BOARD_TOKEN) -> Access:
        """Return the access rules for the local names and `names`, at this port."""
        every = [*LOCAL_NAMES, *(n.lower() for n in names)]
        hosts = {f"{name}:{port}" for name in every} | ({*every} if port == 80 else set())
        # Browsers ignore the port of a cookie, so the name separates two boards on one machine.
        return cls(token, frozenset(hosts), f"tunesmith-{port}", hint)

    def knows(self, given: str | None) -> bool:
        """Return whether this is the token, compared in constant time."""
        return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


class Guard:
    """ASGI middleware that refuses requests before they reach the app."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message.get("headers", [])
                known = {name.lower() for name, _ in given}
                message = {**message, "headers": [*given, *(pair for pair in _RAW_HEADERS if pair[0] not in known)]}
            await send(message)

        refusal = self._refuse(scope)
        if refusal is None:
            await self.app(scope, receive, send_with_headers)
        else:
            await _response(scope, *refusal)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        """Return status, reason and headers of a refusal, or of the redirect that turns a token in the URL into a cookie."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        server = scope.get("server") or ("", 0)
        # The address of the connection itself cannot be a rebound name.
        own = f"{server[0]}:{server[1]}" if ":" not in str(server[0]) else f"[{server[0]}]:{server[1]}"
        if len(headers.getlist("host")) != 1 or (host not in self.access.hosts and host != own):
            return (
                421,
                "this is not an address of the server; use the one it printed, or start it with --allow_host",
                {},
            )
        if (moved := self._login(scope)) is not None:
            return moved
        bearer = headers.get("authorization", "").removeprefix("Bearer ") or None
        if not self.access.knows(bearer) and not self.access.knows(self._cookie(headers)):
            return 401, self.access.hint, {}
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if scope["method"] in READING:
            page = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
            if site in ("cross-site", "same-site") and not page:
                return 403, "cross-site requests are not allowed", {}
            return None
        # A foreign page can make the browser send a cookie, but not an Authorization header.
        same = origin == f"{scope['scheme']}://{host}" or (origin is None and self.access.knows(bearer))
        if not same or site in ("cross-site", "same-site"):
            return 403, "only pages of this server may do this", {}
        return None

    def _login(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if not given or scope["method"] not in READING:
            return None
        if not self.access.knows(given[0]):
            return 401, "the token in this address is wrong or no longer valid", {}
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        cookie = f"{self.access.cookie}={self.access.token}; Path=/; Max-Age={_MAX_AGE}; HttpOnly; SameSite=Strict"
        place = "/" + scope["raw_path"].decode("latin-1").lstrip("/\\")  # never //evil.example
        return 303, "", {"location": place + (f"?{rest}" if rest else ""), "set-cookie": cookie}

    def _cookie(self, headers: Headers) -> str | None:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.access.cookie)
        except CookieError:
            return None
        return found.value if found is not None else None


def _response(scope: Scope, status: int, reason: str, headers: dict[str, str]) -> Response:
    more = {"connection": "close", **headers}
    if not reason:
        return Response(status_code=status, headers=more)
    if "text/html" not in Headers(scope=scope).get("accept", ""):
        return JSONResponse({"error": reason}, status, more)
    page = f'<!doctype html><html lang="en"><title>tunesmith board</title><h1>{status}</h1><p>{reason}.</p></html>'
    return HTMLResponse(page, status, more)


def token_file() -> Path:
    """Return the file with the board token of this user."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "tunesmith" / "board-token"


def key_file() -> Path:
    """Return the file with the key of the prediction service, which gives no access to the board."""
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
