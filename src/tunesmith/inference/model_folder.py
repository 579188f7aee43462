"""Model folders and the two files tunesmith adds to them.

`tunesmith.json` stores task, labels, text columns and maximum length. `export.json`, in an exported folder, stores how texts
become inputs of the ONNX graph without transformers. A model folder also loads with `from_pretrained` and `pipeline`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from tunesmith.data.tokenize import LongTexts
from tunesmith.errors import ConfigError
from tunesmith.files import BadFile, read_json, write_new
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.calibration import HeldOut, choose_thresholds
from tunesmith.metrics.table import Suite, make_suite
from tunesmith.models.files import Seal, check_seal, read_config_file, resolve_model
from tunesmith.runs.folder import RunDir, best_trial_of, publish_folder

FACTS_FILE = "tunesmith.json"


@dataclass(frozen=True)
class ModelFacts:
    """Facts about training that prediction needs. `text_columns` is None for a model that tunesmith did not train.

    Three or more text columns are rendered into one text (`data/rows.py`).
    """

    labels: LabelMap
    text_columns: tuple[str, ...] | None
    label_column: str | None
    max_length: int | None
    metrics: tuple[str, ...] | None = None
    long_texts: LongTexts = "head"
    """How rows longer than `max_length` were read in training."""
    held_out: HeldOut | None = None
    """Confidence and correctness of the validation examples, from which `Predictor.abstaining` chooses a threshold."""

    @property
    def rendered(self) -> bool:
        """Return whether the model reads three or more columns as one text."""
        return len(self.text_columns or ()) > 2

    def suite(self, names: Sequence[str] | None = None) -> Suite:
        """Return these metrics, by default those of training."""
        known = self.labels
        names = names or self.metrics
        return make_suite(known.task, names=names, positive_name=known.positive_name, thresholds=known.thresholds)

    def read_labeled(
        self, source: Any, text: tuple[str, ...] = (), label: str | None = None, **reading: Any
    ) -> tuple[list[list[str]], npt.NDArray[Any]]:
        """Return the texts by column and the label ids of a table; columns are by default those of training."""
        from tunesmith.data.read import read_labeled
        from tunesmith.data.rows import Columns, input_columns

        text = text or self.text_columns or ("text",)
        columns = Columns(text, label or self.label_column or "label", self.labels.task)
        dataset = read_labeled(source, columns=columns, labels=self.labels, **reading)
        return [dataset[name][:] for name in input_columns(text)], np.asarray(dataset["labels"])

    @property
    def example(self) -> str:
        """Return one example to predict, as Python code for a model card."""
        columns = self.text_columns or ("text",)
        return {1: '["..."]', 2: '[("...", "...")]'}.get(len(columns)) or json.dumps([dict.fromkeys(columns, "...")])

    def write(self, folder: Path) -> None:
        """Write the facts into a model folder."""
        held_out = None if self.held_out is None else self.held_out.to_json()
        data = {**vars(self), "labels": self.labels.to_json(), "held_out": held_out}
        write_new(folder / FACTS_FILE, json.dumps(data, indent=None if held_out else 1, ensure_ascii=False).encode())

    def abstaining(self, max_error: float, *, per_class: bool = False) -> ModelFacts:
        """Return the facts of a model that answers only if it is sure enough; see `Predictor.abstaining`."""
        labels = self.labels
        if labels.task not in (Task.BINARY, Task.MULTICLASS):
            raise ConfigError(f"a {labels.task.value} model cannot abstain: --max_error requires one class per example")
        if not 0 < max_error < 1:
            raise ConfigError(f"--max_error must be between 0 and 1, got {max_error:g}")
        if self.held_out is None:
            fix = "Set --calibration_file to a file with labeled examples that the model was not trained on."
            raise ConfigError("the model folder has no held-out examples to choose a threshold on", fix=fix)
        found = choose_thresholds(self.held_out, max_error, labels.names, per_class=per_class)
        return replace(self, labels=replace(labels, abstention=found))


def read_facts(folder: Path) -> ModelFacts:
    """Return the facts of a model folder, from config.json if tunesmith did not train the model."""
    config = read_config_file(folder)
    file = folder / FACTS_FILE
    if file.is_file():
        try:
            data = read_json(file, follow=True)
            columns, metrics = data["text_columns"], data["metrics"]
            long_texts = data.get("long_texts", "head")
            if long_texts not in get_args(LongTexts):
                raise ValueError(f"long_texts is {long_texts!r}")
            return ModelFacts(
                LabelMap.from_json(data["labels"]),
                None if columns is None else tuple(columns),
                data["label_column"],
                data["max_length"],
                None if metrics is None else tuple(metrics),
                cast(LongTexts, long_texts),
                None if data.get("held_out") is None else HeldOut.from_json(data["held_out"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"is damaged ({error})", where=str(file)) from error
    names = config.get("id2label")
    if not names and "ForSequenceClassification" in str(config.get("architectures")):
        names = {0: "LABEL_0", 1: "LABEL_1"}  # the default, which transformers omits from config.json
    if not names:
        raise ConfigError("config.json has no id2label: it is not a trained classifier", where=str(folder))
    ordered = [str(names[k]) for k in sorted(names, key=int)]
    kind = config.get("problem_type")
    labels = LabelMap.for_classes(ordered)
    if kind == "regression" or len(ordered) == 1:
        labels = LabelMap(tuple(ordered), Task.REGRESSION)
    elif kind == "multi_label_classification":
        labels = LabelMap(tuple(ordered), Task.MULTILABEL)
    return ModelFacts(labels, None, None, None)


def model_folder_of(path: str | Path) -> Seal:
    """Return the verified model folder of a run, of the best trial of a search, or `path` itself if it is a model folder."""
    folder = best_trial_of(path)
    run = RunDir(folder)
    if run.model.is_dir():
        return check_seal(run.model)
    if run.journal_file.exists():
        fix = f"Run `tunesmith resume {folder}`."
        raise ConfigError("the run has no model/ yet because it is not finished", where=str(folder), fix=fix)
    if is_graph_folder(folder):
        return check_seal(folder)
    return check_seal(resolve_model(folder, allow_download=False))


def describe_model(model: Any, tokenizer: Any, facts: ModelFacts) -> Callable[[Path], None]:
    """Return a function that writes config, tokenizer and facts into a folder of weights."""

    def describe(folder: Path) -> None:
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.dtype = "float32"
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        facts.write(folder)

    return describe


def export_model(
    target: Path, weights: dict[str, Any], describe: Callable[[Path], None], card: str, meta: dict[str, Any]
) -> None:
    """Write the model folder and publish it with one rename. `meta` is stored in its manifest."""
    from tunesmith.training.checkpoint import WEIGHTS, write_files

    def fill(folder: Path) -> None:
        write_files(folder, {WEIGHTS: weights})
        describe(folder)
        write_new(folder / "README.md", card.encode())

    size = sum(t.numel() * t.element_size() for t in weights.values())
    publish_folder(target, fill, {"kind": "model", **meta}, bytes_needed=size)


EXPORT_FILE = "export.json"
GRAPH_FILE = "onnx/model.onnx"
"""The path where optimum and sentence-transformers also look for a graph."""
FORMATS = ("onnx", "onnx-int8")
"""Formats of `tunesmith export`."""
INSTALL_RUNTIME = (
    "It needs no torch: `pip install 'tunesmith[runtime]'`. For a smaller installation with the exact versions it was measured "
    "with: `pip install --no-deps --no-compile -r requirements.txt`."
)
"""The sentence of a model card about the packages to install."""


@dataclass(frozen=True)
class GraphFacts:
    """How texts become the inputs of an exported graph."""

    format: str
    max_length: int
    vocab_size: int
    has_types: bool
    pairs: bool
    """Whether the model accepts a second text."""
    pad_token_id: int
    pad_token_type_id: int
    padding_side: str
    truncation_side: str
    split_special_tokens: bool
    measured: dict[str, Any] = field(default_factory=dict)
    """Scores and speed compared with the original model, measured before the folder was written."""

    def write(self, folder: Path) -> None:
        """Write `export.json` into a new folder."""
        write_new(folder / EXPORT_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False).encode())


def read_graph_facts(folder: Path) -> GraphFacts:
    """Return the facts of an exported folder; raise a ConfigError if they are damaged or the format is not supported."""
    file = folder / EXPORT_FILE
    try:
        found = GraphFacts(**read_json(file, follow=True))
        if found.format not in FORMATS:
            fix = f"Export the run again with --to {FORMATS[0]}."
            raise ConfigError(f"format {str(found.format)[:40]!r} is not supported", where=str(file), fix=fix)
        if not 1 <= found.max_length <= 1_000_000 or found.vocab_size < 1:
            raise BadFile("max_length or vocab_size is out of range")
    except (OSError, BadFile, TypeError, ValueError) as error:
        raise ConfigError(f"cannot be used ({error})", where=str(file)) from None
    return found


def is_graph_folder(folder: Path) -> bool:
    """Return whether `tunesmith export` wrote this folder."""
    return (folder / EXPORT_FILE).is_file()
