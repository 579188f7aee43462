"""Request bodies, read with a size and a time limit, and checked before anything else sees them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

MAX_BODY_BYTES = 1_000_000
BODY_SECONDS = 30.0
MAX_TEXTS = 64
MAX_TEXT_CHARS = 50_000


class BadRequest(Exception):
    """What is wrong with a request; becomes an answer with this status and a JSON reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Texts:
    """What to classify. `pairs` is None for a model of single texts."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None


async def read_json_body(request: Request) -> Any:
    """The JSON value in the body. Nothing over the limit is kept in memory, whatever the headers promise."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise BadRequest(415, "send application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadRequest(415, "send the body without compression")
    promised = request.headers.get("content-length", "")
    if promised.isdigit() and (len(promised) > 18 or int(promised) > MAX_BODY_BYTES):
        raise BadRequest(413, f"the body may have {MAX_BODY_BYTES:,} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise BadRequest(413, f"the body may have {MAX_BODY_BYTES:,} bytes")
    except TimeoutError:
        raise BadRequest(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise BadRequest(400, "the body was not sent to its end") from None
    return parse_json_body(bytes(body))


def parse_json_body(body: bytes) -> Any:
    """The value; NaN, Infinity, broken UTF-8 and nesting without end are refused."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRequest(422, "the JSON is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(422, f"not JSON: {str(error)[:100]}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_texts(data: Any) -> Texts:
    """{"texts": [...], "pairs": [...]} with strings within the limits."""
    if not isinstance(data, dict) or not {"texts"} <= data.keys() <= {"texts", "pairs"}:
        raise BadRequest(422, 'send {"texts": ["..."]}, and "pairs": ["..."] for a model of text pairs')
    texts = _strings(data["texts"], "texts")
    pairs = None if data.get("pairs") is None else _strings(data["pairs"], "pairs")
    if pairs is not None and len(pairs) != len(texts):
        raise BadRequest(422, f"{len(texts)} texts but {len(pairs)} pairs")
    return Texts(texts, pairs)


def _strings(values: Any, name: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise BadRequest(422, f"{name} must be a list of strings, at least one")
    if len(values) > MAX_TEXTS:
        raise BadRequest(422, f"{len(values):,} {name} at once; at most {MAX_TEXTS} (`tunesmith predict` takes files)")
    longest = max(map(len, values))
    if longest > MAX_TEXT_CHARS:
        raise BadRequest(413, f"a text of {longest:,} characters; at most {MAX_TEXT_CHARS:,}")
    if any("\ud800" <= c <= "\udfff" for v in values for c in v):
        raise BadRequest(422, f"{name} hold half a character (a lone surrogate)")
    return tuple(values)
