"""Request bodies, read with a size and a time limit, and checked before anything else sees them.

POST /predict has two dialects: our own (`texts`, `pairs`), and `inputs` as text-embeddings-inference reads it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from tunesmith.labels import LabelMap, Task

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


OWN_FORM = (
    'send {"texts": ["..."]}, and "pairs": ["..."] for a model of text pairs; "top_k" and "raw_scores" are optional'
)
INPUT_FORM = '"inputs" is a string, or a list of rows [["text"], ...] or [["text", "second text"], ...]'
_OPTIONS = {"top_k", "raw_scores"}
_TEI_OPTIONS = {"raw_scores", "truncate", "truncation_direction"}


@dataclass(frozen=True, slots=True)
class Question:
    """What to classify and how the answer is to look. `single`: one row was asked for in the other dialect."""

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
        data = {**{k: v for k, v in data.items() if k not in ("text", "text_pair")}, "texts": [data["text"]]} | (
            {"pairs": [data["text_pair"]]} if data.get("text_pair") is not None else {}
        )
    if not isinstance(data, dict) or not {"texts"} <= data.keys() <= {"texts", "pairs"} | _OPTIONS:
        raise BadRequest(422, OWN_FORM)
    given = parse_texts({name: value for name, value in data.items() if name not in _OPTIONS})
    return Question(given, _top_k(data.get("top_k")), _switch(data, "raw_scores"))


def _parse_inputs(data: dict[str, Any]) -> Question:
    if not {"inputs"} <= data.keys() <= {"inputs"} | _TEI_OPTIONS:
        raise BadRequest(422, INPUT_FORM)
    inputs = data["inputs"]
    raw = _switch(data, "raw_scores")
    if isinstance(inputs, str):
        return Question(parse_texts({"texts": [inputs]}), raw=raw, inputs=True, single=True)
    if not isinstance(inputs, list) or not inputs:
        raise BadRequest(422, INPUT_FORM)
    if all(isinstance(row, str) for row in inputs):  # that server takes two bare strings for one pair
        if len(inputs) != 2:
            raise BadRequest(422, INPUT_FORM)
        return Question(parse_texts({"texts": inputs[:1], "pairs": inputs[1:]}), raw=raw, inputs=True, single=True)
    sizes = {len(row) if isinstance(row, list) else 0 for row in inputs}
    if sizes not in ({1}, {2}):
        raise BadRequest(422, INPUT_FORM)
    body: dict[str, Any] = {"texts": [row[0] for row in inputs]}
    if sizes == {2}:
        body["pairs"] = [row[1] for row in inputs]
    return Question(parse_texts(body), raw=raw, inputs=True)


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
