"""The rows an export is measured on, and the training rows that calibrate a quantisation: the run's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.config.load import load_config
from tunesmith.errors import ConfigError
from tunesmith.predict.facts import ModelFacts
from tunesmith.reading.columns import Columns
from tunesmith.reading.load import read_labelled
from tunesmith.run.layout import RunDir
from tunesmith.session.inputs import read_run_data

MOST_ROWS = 5_000
CALIBRATION_ROWS = 256


@dataclass(frozen=True)
class EvidenceRows:
    """Texts by column with their labels, from one split; `calibration` are texts of training rows."""

    split: str
    texts: list[list[str]]
    labels: npt.NDArray[Any]
    calibration: list[list[str]]

    def __len__(self) -> int:
        return len(self.labels)


def rows_of_run(run: RunDir, facts: ModelFacts) -> EvidenceRows:
    """Labelled test rows if there are any, else validation rows; read again from the files that run.yaml names."""
    config = load_config(run.config_file)
    try:
        bundle = read_run_data(config, {}, _silent, need_weights=False).bundle
    except ConfigError as error:
        problem = f"the rows of the run cannot be read again ({error.problem})"
        raise ConfigError(problem, where=str(run.path), fix="Give --test_file, and --train_file for int8.") from None
    assert facts.text_columns is not None
    for split in ("test", *(name for name in bundle.splits if name.startswith("validation"))):
        if split in bundle.splits:
            found = _labelled(bundle.splits[split], facts, split)
            if len(found[1]):
                return EvidenceRows(split, *found, _texts(bundle.splits["train"], facts, CALIBRATION_ROWS))
    raise ConfigError("has no labelled test or validation row", where=str(run.path), fix="Give --test_file.")


def rows_of_files(test_file: str, train_file: str | None, facts: ModelFacts, **reading: Any) -> EvidenceRows:
    """Rows of files that the user names: for a model folder that is not in its run."""
    columns = Columns(facts.text_columns or ("text",), facts.label_column or "label", facts.labels.task)

    def read(file: str) -> Any:
        return read_labelled(Path(file), columns=columns, labels=facts.labels, **reading)

    texts, labels = _labelled(read(test_file), facts, "test")
    if not len(labels):
        raise ConfigError("has no labelled row", where=test_file)
    calibration = [] if train_file is None else _texts(read(train_file), facts, CALIBRATION_ROWS)
    return EvidenceRows("test", texts, labels, calibration)


def _texts(dataset: Any, facts: ModelFacts, count: int) -> list[list[str]]:
    """`count` rows, spread over the data set because files are often sorted."""
    rows = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int)
    some = dataset.select(rows.tolist())
    return [list(some[name]) for name in facts.text_columns or ("text",)]


def _labelled(dataset: Any, facts: ModelFacts, split: str) -> tuple[list[list[str]], npt.NDArray[Any]]:
    labels = np.asarray(dataset["labels"])
    known = np.isfinite(labels) if labels.dtype.kind == "f" else labels >= 0
    known = known.all(axis=1) if known.ndim == 2 else known
    rows = np.flatnonzero(known)[:MOST_ROWS]
    some = dataset.select(rows.tolist())
    return [list(some[name]) for name in facts.text_columns or ("text",)], labels[rows]


def _silent(what: str, done: int, total: int) -> None:
    """No progress bar: reading is quick compared with the export."""
