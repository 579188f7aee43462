"""The description of the prediction service that tools read (OpenAPI 3.1), and a page that shows it."""

from __future__ import annotations

import html
import json
from typing import Any

from tunesmith import __version__

_STRINGS = {"type": "array", "items": {"type": "string"}}
_OWN: dict[str, Any] = {
    "type": "object",
    "required": ["texts"],
    "properties": {
        "texts": {**_STRINGS, "description": "what to classify; a single one may be sent as text"},
        "pairs": {**_STRINGS, "description": "the second text of each, for a model of pairs"},
        "top_k": {"type": "integer", "minimum": 1, "description": "only so many of the best labels"},
        "raw_scores": {"type": "boolean", "description": "logits instead of probabilities"},
    },
}
_INPUTS: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "inputs": {"description": "a string, [[text], ...] or [[text, second], ...]: as text-embeddings-inference"},
        "raw_scores": {"type": "boolean"},
        "truncate": {"type": "boolean", "description": "taken; long texts are always cut"},
    },
}


def describe_service(columns: list[str], labels: list[str]) -> dict[str, Any]:
    """The OpenAPI document of a service for this model."""
    refusals = {"401": "no key", "413": "too large", "422": "not understood", "429": "too many wait: see Retry-After"}
    body = {"required": True, "content": {"application/json": {"schema": {"oneOf": [_OWN, _INPUTS]}}}}
    predict = {
        "summary": f"Labels of {' and '.join(columns)}: {', '.join(labels[:20])}",
        "requestBody": body,
        "responses": {"200": {"description": "one result a text, scores sorted from the best"}}
        | {status: {"description": text} for status, text in refusals.items()},
    }
    looks = {
        "/health": "the process answers, and its model folder is intact",
        "/ready": "the model is loaded",
        "/info": "model, task, labels and limits",
        "/metrics": "counters for Prometheus",
    }
    paths: dict[str, Any] = {"/predict": {"post": predict}}
    paths |= {
        path: {"get": {"summary": text, "responses": {"200": {"description": text}}}} for path, text in looks.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "tunesmith serve", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


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
