"""A service as an ASGI app: its routes inside, the guard around all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith.serve.security import Access, Guard


class Service(Protocol):
    """What can be served: the board, or one model."""

    how: str
    """The answer to a client without the token."""

    def routes(self) -> list[Route]:
        """All its routes."""

    async def close(self) -> None:
        """Ends what would not end by itself."""

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
