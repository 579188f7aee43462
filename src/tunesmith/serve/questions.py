"""Two dialects of POST /predict: our own (`texts`, `pairs`), and `inputs` as text-embeddings-inference reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunesmith.labels import LabelMap, Task
from tunesmith.serve.bodies import BadRequest, Texts, parse_texts

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
