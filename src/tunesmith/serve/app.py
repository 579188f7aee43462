"""The board as an ASGI app: routes inside, the guard around all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tunesmith.serve.routes import Board
from tunesmith.serve.security import Access, Guard


def make_app(board: Board, access: Access) -> Guard:
    """The guarded app."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await board.hub.close()
        board.classifier.close()

    plain = {404: "there is nothing here", 405: "not with this method"}
    handlers = {status: _plain_answer(status, reason) for status, reason in plain.items()}
    app = Starlette(routes=board.routes(), lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, access)


def _plain_answer(status: int, reason: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": reason}, status, headers=getattr(error, "headers", None))

    return answer
