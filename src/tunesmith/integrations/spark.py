"""Prediction with Spark: `df.withColumn("answer", predict_udf("runs/mine")("text"))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tunesmith.inference.bulk import label_columns
from tunesmith.inference.model_folder import model_folder_of, read_facts
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import list_answers
from tunesmith.labels import Task


def predict_udf(model: str, *, top_k: int | None = None, **loading: Any) -> Callable[..., Any]:
    """Return a function of one text column, or two for pairs. It returns a struct: the prediction and a probability per label.

    Every executor needs the model at this path. Each Python worker loads it once per partition.
    """
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    folder = model_folder_of(model).folder
    labels = read_facts(folder).labels
    names = list_answers(labels, top_k)
    kinds = {Task.REGRESSION: "double", Task.MULTILABEL: "array<string>"}
    types = [kinds.get(labels.task, "string"), *("string" if n.startswith("label_") else "double" for n in names[1:])]
    schema = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in zip(names, types, strict=True))

    def predict(batches: Any) -> Any:
        predictor = Predictor.load(model, **loading)
        for given in batches:
            columns = given if isinstance(given, tuple) else (given,)
            text = tuple(f"text {place}" for place in range(1, len(columns) + 1))
            texts = {name: column.tolist() for name, column in zip(text, columns, strict=True)}
            answers = list(label_columns(predictor, texts, text, top_k, where="batch").values())[len(text) :]
            yield pd.DataFrame(dict(zip(names, answers, strict=True)))

    # Spark derives the kind of a function from its annotations, which must be objects.
    predict.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.DataFrame]}
    found: Callable[..., Any] = pandas_udf(predict, schema)
    return found
