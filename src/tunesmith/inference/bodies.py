"""Request bodies, read with a size and a time limit, and checked before anything else sees them; and their description that tools
read (OpenAPI 3.1).

POST /predict has two dialects: our own (`texts`, `pairs`), and `inputs` as text-embeddings-inference reads it.
"""

from __future__ import annotations

import asyncio
import html
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from tunesmith import __version__
from tunesmith.labels import LabelMap, Task

MAX_BODY_BYTES = 1_000_000
BODY_SECONDS = 30.0
MAX_TEXTS = 64
MAX_TEXT_CHARS = 50_000


class BadRequest(Exception):
    """An invalid request; it is answered with this status and a JSON reason."""

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


OWN_FORM = (
    'send {"texts": ["..."]}, and "pairs": ["..."] for a model of text pairs; "top_k" and "raw_scores" are optional'
)
INPUT_FORM = '"inputs" is a string, or a list of rows [["text"], ...] or [["text", "second text"], ...]'
_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_TEXTS}
_OPTIONS = {
    "top_k": {"type": ["integer", "null"], "minimum": 1, "description": "at most this many labels, the best first"},
    "raw_scores": {"type": "boolean", "description": "logits instead of probabilities"},
}
_INPUT_OPTIONS = {
    "raw_scores": {"type": "boolean"},
    "truncate": {"description": "taken; long texts are always cut"},
    "truncation_direction": {"description": "taken; the model's own side is cut"},
}


@dataclass(frozen=True, slots=True)
class Question:
    """What to classify and the form of the answer. `single`: `inputs` holds one row."""

    given: Texts
    top_k: int | None = None
    raw: bool = False
    inputs: bool = False
    single: bool = False


def parse_question(data: Any) -> Question:
    """The question in a JSON body of either dialect; anything else is refused with the form that is expected."""
    if isinstance(data, dict) and "inputs" in data:
        return _parse_inputs(data)
    if isinstance(data, dict) and "text" in data and "texts" not in data:
        pair = {} if data.get("text_pair") is None else {"pairs": [data["text_pair"]]}
        rest = {name: value for name, value in data.items() if name not in ("text", "text_pair")}
        data = {**rest, "texts": [data["text"]], **pair}
    if not isinstance(data, dict) or not {"texts"} <= data.keys() <= {"texts", "pairs"} | _OPTIONS.keys():
        raise BadRequest(422, OWN_FORM)
    given = parse_texts({name: value for name, value in data.items() if name not in _OPTIONS})
    return Question(given, _top_k(data.get("top_k")), _switch(data, "raw_scores"))


def _parse_inputs(data: dict[str, Any]) -> Question:
    if not {"inputs"} <= data.keys() <= {"inputs"} | _INPUT_OPTIONS.keys():
        raise BadRequest(422, INPUT_FORM)
    rows = data["inputs"]
    single = isinstance(rows, str) or (
        isinstance(rows, list) and len(rows) == 2 and all(isinstance(r, str) for r in rows)
    )
    if single:  # that server takes two bare strings for one pair
        rows = [[rows] if isinstance(rows, str) else rows]
    sizes = {len(row) if isinstance(row, list) else 0 for row in rows} if isinstance(rows, list) else set()
    if sizes not in ({1}, {2}):
        raise BadRequest(422, INPUT_FORM)
    pairs = {"pairs": [row[1] for row in rows]} if sizes == {2} else {}
    given = parse_texts({"texts": [row[0] for row in rows], **pairs})
    return Question(given, raw=_switch(data, "raw_scores"), inputs=True, single=single)


def _top_k(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # 3.0 is a whole number in JSON
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(422, '"top_k" must be a whole number from 1 on')
    return value


def _switch(data: dict[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(422, f'"{name}" must be true or false')
    return value


def answer_in_form(question: Question, results: list[dict[str, Any]]) -> Any:
    """The results as the dialect of the question expects them, scores sorted from the best."""
    if question.inputs:
        rows = [[{"score": score, "label": name} for name, score in _scores(one, question)] for one in results]
        return rows[0] if question.single else rows
    shaped = []
    for one in results:
        scores = _scores(one, question)[: question.top_k] if one["scores"] else []
        shaped.append({"label": one["label"], "scores": [list(pair) for pair in scores]})
    return {"results": shaped}


def _scores(one: dict[str, Any], question: Question) -> list[tuple[str, float]]:
    labels: LabelMap = one["labels"]
    if labels.task is Task.REGRESSION:
        return [(labels.names[0], float(one["label"]))]
    values = one["logits"] if question.raw else [score for _, score in one["scores"]]
    pairs = list(zip([name for name, _ in one["scores"]], values, strict=True))
    return sorted(pairs, key=lambda pair: -pair[1])


_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_PREDICT_REFUSALS = {
    "400": "the request was not sent to its end",
    "408": "the body did not arrive in time",
    "409": "the model folder cannot be used",
    "413": "too large",
    "415": "not plain application/json",
    "422": "not understood",
    "429": "too many wait: see Retry-After",
    "503": "no answer in time: see Retry-After",
}
_LOOKS = {
    "/health": "the process answers, and its model folder is intact",
    "/ready": "the model is loaded",
    "/info": "model, task, labels and limits",
    "/metrics": "counters for Prometheus",
}


def describe_service(columns: list[str], labels: list[str]) -> dict[str, Any]:
    """The OpenAPI document of a service for this model."""
    predict = {
        "summary": f"Labels of {' and '.join(columns)}: {', '.join(labels[:20])}",
        "requestBody": {"required": True, "content": _json({"oneOf": _questions(pair=len(columns) == 2)})},
        "responses": {
            "200": {"description": "one result a text, scores sorted from the best", "content": _json(_answers())},
            **_refused({"401": "no key", **_PREDICT_REFUSALS}),
        },
    }
    paths: dict[str, Any] = {"/predict": {"post": predict}}
    for path, text in _LOOKS.items():
        responses = {"200": {"description": text}, **_refused({"401": "no key"})}
        if path in ("/health", "/ready"):
            responses["503"] = {"description": "not now"}
        paths[path] = {"get": {"summary": text, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tunesmith serve", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _refused(reasons: dict[str, str]) -> dict[str, Any]:
    return {status: {"description": text, "content": _json(_ERROR)} for status, text in reasons.items()}


def _questions(*, pair: bool) -> list[dict[str, Any]]:
    """The bodies that are understood: many texts, one text, and `inputs` as text-embeddings-inference reads them."""
    row = {"type": "array", "items": _TEXT, "minItems": 1 + pair, "maxItems": 1 + pair}
    many = {"type": "array", "items": row, "minItems": 1, "maxItems": MAX_TEXTS}
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"texts": _TEXTS} | ({"pairs": {**_TEXTS, "description": "one for each of texts"}} if pair else {}), _OPTIONS),
        ({"text": _TEXT} | ({"text_pair": _TEXT} if pair else {}), _OPTIONS),
        ({"inputs": {"oneOf": [row if pair else _TEXT, many]}}, _INPUT_OPTIONS),
    ]
    return [
        {"type": "object", "required": list(asked), "properties": asked | more, "additionalProperties": False}
        for asked, more in forms
    ]


def _answers() -> dict[str, Any]:
    """Our own answer, and that of text-embeddings-inference for one row and for many."""
    scored = {"type": "array", "items": {"type": ["string", "number"]}, "minItems": 2, "maxItems": 2}
    scores = {"type": "array", "items": {**scored, "description": "label and score"}}
    label = {"description": "a name; a list of names (multilabel); a number (regression)"}
    result = {"type": "object", "required": ["label", "scores"], "properties": {"label": label, "scores": scores}}
    results = {"type": "array", "items": result, "minItems": 1}
    score = {"type": "object", "required": ["score", "label"]}
    row = {"type": "array", "items": score}
    ours = {"type": "object", "required": ["results"], "properties": {"results": results}}
    return {"oneOf": [ours, row, {"type": "array", "items": row}]}


def docs_page(document: dict[str, Any]) -> str:
    """The document as an HTML page without a script."""
    rows = "".join(
        f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(what['summary'])}</p>"
        for path, methods in document["paths"].items()
        for method, what in methods.items()
    )
    text = html.escape(json.dumps(document, indent=1, ensure_ascii=False))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>tunesmith serve</title><h1>tunesmith serve</h1>{rows}'
        f"<h2>openapi.json</h2><pre>{text}</pre></html>"
    )
