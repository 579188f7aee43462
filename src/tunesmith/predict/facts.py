"""What a model folder must remember beside its weights: task, labels, text columns, row length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from tunesmith.encoder.model_files import Seal, check_seal
from tunesmith.encoder.resolve import resolve_model
from tunesmith.errors import ConfigError
from tunesmith.files import read_json
from tunesmith.labels import LabelMap, Task
from tunesmith.predict.graph_facts import is_graph_folder
from tunesmith.run.layout import RunDir, best_trial_of
from tunesmith.run.writing import write_new
from tunesmith.tokens.truncation import LongTexts

FACTS_FILE = "tunesmith.json"


@dataclass(frozen=True)
class ModelFacts:
    """How a model was trained, as far as prediction needs to know. `text_columns` is None for a foreign model."""

    labels: LabelMap
    text_columns: tuple[str, ...] | None
    label_column: str | None
    max_length: int | None
    glue_task: str | None = None
    metrics: tuple[str, ...] | None = None
    long_texts: LongTexts = "head"
    """What the model was shown of rows longer than `max_length`."""

    def write(self, folder: Path) -> None:
        """Writes the facts into a model folder."""
        data = {
            "labels": self.labels.to_json(),
            "text_columns": self.text_columns,
            "label_column": self.label_column,
            "max_length": self.max_length,
            "glue_task": self.glue_task,
            "metrics": self.metrics,
            "long_texts": self.long_texts,
        }
        write_new(folder / FACTS_FILE, json.dumps(data, indent=1, ensure_ascii=False).encode())


def read_facts(folder: Path, config: dict[str, Any]) -> ModelFacts:
    """The facts of a model folder; for a folder of another tool, what its config.json says."""
    file = folder / FACTS_FILE
    if file.is_file():
        try:
            data = read_json(file, follow=True)
            columns, metrics = data["text_columns"], data["metrics"]
            return ModelFacts(
                LabelMap.from_json(data["labels"]),
                None if columns is None else tuple(columns),
                data["label_column"],
                data["max_length"],
                data["glue_task"],
                None if metrics is None else tuple(metrics),
                _long_texts(data.get("long_texts", "head")),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"is damaged ({error})", where=str(file)) from error
    names = config.get("id2label")
    if not names and "ForSequenceClassification" in str(config.get("architectures")):
        names = {0: "LABEL_0", 1: "LABEL_1"}  # transformers leaves out of config.json what it would fill in itself
    if not names:
        raise ConfigError("config.json has no id2label: it is not a trained classifier", where=str(folder))
    ordered = [str(names[k]) for k in sorted(names, key=int)]
    kind = config.get("problem_type")
    if kind == "regression" or len(ordered) == 1:
        return ModelFacts(LabelMap(tuple(ordered), Task.REGRESSION), None, None, None)
    if kind == "multi_label_classification":
        return ModelFacts(LabelMap(tuple(ordered), Task.MULTILABEL), None, None, None)
    return ModelFacts(LabelMap.for_classes(ordered), None, None, None)


def _long_texts(value: Any) -> LongTexts:
    if value not in get_args(LongTexts):
        raise ValueError(f"long_texts is {value!r}")
    return cast(LongTexts, value)


def model_folder_of(path: str | Path) -> Seal:
    """`model/` of a run folder or of the best trial of a search, or the folder itself when it is a model; verified."""
    folder = best_trial_of(path)
    run = RunDir(folder)
    if run.model.is_dir():
        return check_seal(run.model)
    if run.journal_file.exists():
        fix = f"Continue with `tunesmith resume {folder}`."
        raise ConfigError("the run has no model/ yet: it was not finished", where=str(folder), fix=fix)
    if is_graph_folder(folder):
        return check_seal(folder)
    return check_seal(resolve_model(folder, allow_download=False))
