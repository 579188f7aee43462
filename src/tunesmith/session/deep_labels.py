"""Labels judged by k-fold fine-tuning: each row by a model that was trained on the other folds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.audit.text_survey import Ints
from tunesmith.config.schema import RunConfig
from tunesmith.labels import LabelMap, Task
from tunesmith.reading.load import DataBundle
from tunesmith.reading.row_cache import read_prediction_columns
from tunesmith.session.from_config import finetune
from tunesmith.session.watch import Watch

FOLDS = 4
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


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
            result = finetune(own, watch=Watch(progress=watch.progress, pages=False), **data)
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
        eval_strategy="no",
        load_best_model_at_end=False,
        save_strategy="no",
        train_sample_size=0,
    )


def merge_judges(one: Ints, two: Ints, ids: Ints, labels: LabelMap) -> Ints:
    """A weighted geometric mean of two judges' probabilities (a weighted mean of their numbers).

    The weights are those under which the given labels are likeliest: neither judge has seen the label of the row it judges.
    """
    best, found = np.inf, one
    if labels.task is Task.REGRESSION:
        for share in np.linspace(0, 1, 9):
            merged = share * one + (1 - share) * two
            loss = float(np.abs(merged[:, 0] - ids).sum())
            best, found = (loss, merged) if loss < best else (best, found)
        return found
    sides, rows = [np.log(np.maximum(judged, 1e-6)) for judged in (one, two)], np.arange(len(ids))
    for first, second in product(WEIGHTS, repeat=2):
        logits = first * sides[0] + second * sides[1]
        merged = np.exp(logits - logits.max(axis=1, keepdims=True))
        merged /= merged.sum(axis=1, keepdims=True)
        loss = -float(np.log(np.maximum(merged[rows, ids], 1e-6)).sum())
        best, found = (loss, merged) if loss < best else (best, found)
    return found
