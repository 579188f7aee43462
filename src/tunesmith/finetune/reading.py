"""The data of a run and the folder of its model: everything that can be found wrong before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.data.load import DataBundle, load_data
from tunesmith.finetune.watch import Progress
from tunesmith.labels import Task
from tunesmith.model.config_file import read_config
from tunesmith.model.head import HeadNames, read_head_names
from tunesmith.model.resolve import resolve_model

PLAIN_OPTIONS = (
    "train_file",
    "validation_file",
    "test_file",
    "task_name",
    "dataset_name",
    "dataset_config_name",
    "text_column_names",
    "label_column_name",
    "label_names",
    "do_regression",
    "validation_split_fraction",
    "encoding",
    "delimiter",
    "quoting",
    "max_train_samples",
    "max_eval_samples",
    "max_predict_samples",
    "allow_single_label",
    "allow_empty_text",
    "cache_dir",
)
"""Options that the reader takes under the same name."""


@dataclass(frozen=True)
class RunData:
    """The splits, the folder of the model, and what the head of that model says about its labels."""

    bundle: DataBundle
    folder: Path
    new_head: bool
    notes: tuple[str, ...]


def read_run_data(
    config: RunConfig, data: Mapping[str, Any], progress: Progress, *, need_weights: bool = True
) -> RunData:
    """Finds the model, then reads the data with its labels in the order of the model's head, if it has one."""
    folder = resolve_model(
        config.model_name_or_path,
        revision=config.model_revision,
        cache_dir=config.cache_dir,
        allow_download=config.allow_download,
        need_weights=need_weights,
    )
    head = read_head_names(read_config(folder))
    given: dict[str, Any] = {name: getattr(config, name) for name in PLAIN_OPTIONS}
    given |= {f"{split}_data": rows for split, rows in data.items()}
    splits = {split: getattr(config, f"{split}_split_name") for split in ("train", "validation", "test")}
    bundle = load_data(
        **given,
        seed=config.seed if config.data_seed is None else config.data_seed,
        split_names={split: name for split, name in splits.items() if name is not None},
        hub_options={"allow_download": config.allow_download},
        head_names=head.names,
        on_progress=lambda done, total: progress("reading", done, total),
    )
    return _match_head(bundle, folder, head, allow_new=config.ignore_mismatched_sizes)


def _match_head(bundle: DataBundle, folder: Path, head: HeadNames, *, allow_new: bool) -> RunData:
    labels = bundle.labels
    if labels.task is Task.REGRESSION or not head.names or len(head.names) != len(labels):
        return RunData(bundle, folder, False, ())  # loading refuses a head of another size
    if head.fits(labels.names):
        note = f"Labels: in the order of the model's head, {', '.join(labels.names[:8])}."
        return RunData(bundle, folder, False, (note,))
    if allow_new:
        note = f"The model's head was trained for {', '.join(head.names[:8])}: it starts afresh."
        return RunData(bundle, folder, True, (note,))
    raise head.refusal(labels.names, str(folder))
