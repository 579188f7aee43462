"""The description of the prediction service that tools read (OpenAPI 3.1), and a page that shows it."""

from __future__ import annotations

import html
import json
from typing import Any

from tunesmith import __version__
from tunesmith.serve.bodies import MAX_TEXT_CHARS, MAX_TEXTS

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
    """The document for a person, without a script."""
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
