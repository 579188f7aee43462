"""Labels judged by k-fold fine-tuning: each row by a model that was trained on the other folds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.audit.text_survey import Ints
from tunesmith.config.schema import RunConfig
from tunesmith.labels import LabelMap, Task
from tunesmith.reading.load import DataBundle
from tunesmith.reading.prediction_file import read_prediction_columns
from tunesmith.session.from_config import finetune
from tunesmith.session.watch import Watch

FOLDS = 4


def judge_by_folds(
    config: RunConfig, bundle: DataBundle, texts: Sequence[Sequence[str]], ids: Ints, watch: Watch
) -> Ints:
    """Probabilities (rows, labels), or the predicted numbers, of the weights after the last step of each fold."""
    labels = bundle.labels
    regression = labels.task is Task.REGRESSION
    names = [f"text{at}" for at in range(len(texts[0]))]
    rows = [
        {**dict(zip(names, row, strict=True)), "label": float(i) if regression else labels.names[int(i)]}
        for row, i in zip(texts, ids, strict=True)
    ]
    fold = np.random.default_rng(config.seed).permutation(len(rows)) % FOLDS
    judged = np.zeros((len(rows), len(labels)))
    for number in range(FOLDS):
        watch.say(f"Labels: fold {number + 1} of {FOLDS} is judged by a model trained on the others.")
        with tempfile.TemporaryDirectory(prefix="tunesmith-folds-") as folder:
            here = np.flatnonzero(fold == number)
            own = _fold_config(config, labels, names, folder)
            data: dict[str, Any] = {
                "train_data": [rows[i] for i in np.flatnonzero(fold != number)],
                "validation_data": [rows[i] for i in here],
            }
            result = finetune(own, watch=Watch(progress=watch.progress), **data)
            columns = read_prediction_columns(result.run.predictions_file)
            wanted = ["prediction"] if regression else [f"prob_{name}" for name in labels.names]
            judged[here] = np.stack([np.asarray(columns[name], dtype=np.float64) for name in wanted], axis=1)
    return judged


def _fold_config(config: RunConfig, labels: LabelMap, names: Sequence[str], folder: str) -> RunConfig:
    """The same run on rows in memory, in a folder that goes away; the last weights are judged, not the best."""
    regression = labels.task is Task.REGRESSION
    return replace(
        config,
        train_file=None,
        validation_file=None,
        test_file=None,
        task_name=None,
        dataset_name=None,
        dataset_config_name=None,
        labels_file=None,
        strict_data=False,
        text_column_names=tuple(names),
        label_column_name="label",
        label_names=None if regression else labels.names,
        do_regression=regression,
        output_dir=str(Path(folder) / "run"),
        cache_dir=folder,
        load_best_model_at_end=False,
        save_strategy="no",
        train_sample_size=0,
    )


def merge_judges(one: Ints, two: Ints, labels: LabelMap) -> Ints:
    """The geometric mean of two judges' probabilities; the mean of their numbers."""
    if labels.task is Task.REGRESSION:
        return (one + two) / 2
    both = np.sqrt(np.maximum(one, 1e-6) * np.maximum(two, 1e-6))
    merged: Ints = both / both.sum(axis=1, keepdims=True)
    return merged
