"""Ray Data and Spark, if installed, return the same predictions as the Predictor.

Neither is a development dependency: they need 240 and 491 MB, and take 10 to 20 s to start.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tiny_model import save_tiny_bert, sentences
from tunesmith.errors import DataError
from tunesmith.inference.model_folder import ModelFacts
from tunesmith.inference.predictor import Predictor
from tunesmith.integrations.ray import TunesmithPredictor
from tunesmith.labels import LabelMap

TEXTS = [text for text, _ in sentences(300, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_bert(tmp_path_factory.mktemp("model") / "tiny", labels=("bad", "good"))
    ModelFacts(LabelMap.for_classes(["bad", "good"]), ("text",), "label", 32).write(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[str], list[float]]:
    predictor = Predictor.load(model, use_cpu=True)
    return predictor.predict(TEXTS), predictor.probabilities(TEXTS)[:, 1].tolist()


def test_batch_is_returned_with_prediction_columns(model: Path, expected: tuple[list[str], list[float]]) -> None:
    predict = TunesmithPredictor(str(model), use_cpu=True)
    found = predict({"id": np.arange(300), "text": np.array(TEXTS, dtype=object)})
    assert list(found) == ["id", "text", "prediction", "prob_bad", "prob_good"]
    assert found["prediction"] == expected[0]
    assert found["prob_good"] == expected[1]
    assert predict({"text": np.array([], dtype=object)})["prob_bad"] == []
    with pytest.raises(DataError, match="has no column 'text', only words"):
        predict({"words": np.array(TEXTS)})


@pytest.mark.filterwarnings("default")  # from the engine itself
def test_ray_data_maps_batches_over_actors(model: Path, expected: tuple[list[str], list[float]]) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray (pip install 'ray[data]')")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, address="local")
    try:
        rows = ray.data.from_items([{"id": i, "text": text} for i, text in enumerate(TEXTS)])
        answers = rows.map_batches(
            TunesmithPredictor,
            fn_constructor_args=[str(model)],
            fn_constructor_kwargs={"use_cpu": True},
            batch_size=64,
            concurrency=2,
        )
        found = sorted(answers.take_all(), key=lambda row: row["id"])
    finally:
        ray.shutdown()
    assert [row["text"] for row in found] == TEXTS
    assert [row["prediction"] for row in found] == expected[0]
    np.testing.assert_allclose([row["prob_good"] for row in found], expected[1], atol=1e-6)


@pytest.mark.filterwarnings("default")  # from the engine itself
def test_spark_adds_a_prediction_column(
    model: Path, expected: tuple[list[str], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark", reason="needs Spark (pip install pyspark, and Java 17)")
    from pyspark.sql import SparkSession

    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    from tunesmith.integrations.spark import predict_udf

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = (
        builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
    )
    try:
        rows = spark.createDataFrame(list(enumerate(TEXTS)), ["id", "text"]).repartition(3)
        found = rows.withColumn("answer", predict_udf(str(model), use_cpu=True)("text")).orderBy("id").collect()
        best = rows.select(predict_udf(str(model), top_k=1, use_cpu=True)("text").alias("best")).first()
    finally:
        spark.stop()
    assert [row.text for row in found] == TEXTS
    assert [row.answer.prediction for row in found] == expected[0]
    np.testing.assert_allclose([row.answer.prob_good for row in found], expected[1], atol=1e-6)
    assert best.best.asDict().keys() == {"prediction", "label_1", "prob_1"}
