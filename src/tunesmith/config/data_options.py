"""Options about the data: where it is, how it is read, what a row means, how it becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GlueTask = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data"""

    train_file: str | None = None
    """Training rows: csv, tsv, jsonl, parquet or arrow, also gzipped (.gz)."""

    validation_file: str | None = None
    """Rows to evaluate on while training. Without it a part of the training rows is held out."""

    test_file: str | None = None
    """Rows to evaluate (labelled) or predict (unlabelled) once, at the end."""

    task_name: GlueTask | None = None
    """Name of a GLUE task, instead of files."""

    dataset_name: str | None = None
    """Hub id of a dataset, or a folder written by `save_to_disk`, instead of files."""

    dataset_config_name: str | None = None
    """Configuration of `dataset_name`, such as mrpc of glue."""

    train_split_name: str | None = None
    """Split of the dataset to train on. Default: train."""

    validation_split_name: str | None = None
    """Split of the dataset to evaluate on. Default: validation, or the nearest to it that exists."""

    test_split_name: str | None = None
    """Split of the dataset used as the test set. Default: test, where it exists."""

    validation_split_fraction: float = 0.1
    """Share of the training rows held out (seeded, stratified) when there is no validation set. 0: none."""

    max_train_samples: int | None = None
    """Use at most this many training rows."""

    max_eval_samples: int | None = None
    """Use at most this many validation rows."""

    max_predict_samples: int | None = None
    """Use at most this many test rows."""


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Columns and reading"""

    text_column_names: tuple[str, ...] | None = None
    """One column name, or two for a sentence pair. Default: found in the data."""

    label_column_name: str | None = None
    """Column with the label. Default: found in the data."""

    label_names: tuple[str, ...] | None = None
    """All label names, in id order. Default: the sorted names of the training rows."""

    do_regression: bool | None = None
    """The label is a number to predict (true) or a name even if it looks like one (false). Default: found in the data."""

    encoding: str | None = None
    """Text encoding of the files, such as cp1252. Default: UTF-8, or what the byte order mark says."""

    delimiter: str | None = None
    """Column separator of csv and tsv files. Default: by the suffix, checked against the header."""

    quoting: Literal["minimal", "none"] | None = None
    """Quotes in csv and tsv: minimal as in RFC 4180, none = a quote is a plain character. Default: csv minimal, tsv none."""

    allow_single_label: bool = False
    """Train even when every row has the same label."""

    allow_empty_text: bool = False
    """Keep rows whose text is empty instead of refusing the file."""

    allow_changed_data: bool = False
    """Resume although the data is not what the checkpoint was made from; the run records it."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Tokens and batches"""

    max_seq_length: int | None = None
    """Cut inputs to this many tokens. Default: what the model can take, at most 512."""

    pad_to_max_length: bool = False
    """Pad every input to `max_seq_length` instead of the longest of its batch."""

    pad_to_multiple_of: int | None = None
    """Round the padded length up to a multiple of this."""

    preprocessing_num_workers: int | None = None
    """Processes used for tokenizing. Default: one, whose tokenizer uses all cores."""

    overwrite_cache: bool = False
    """Tokenize again although a cached result exists."""

    cache_dir: str | None = None
    """Folder for tokenized data. Default: the cache of `datasets`."""

    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] | None = None
    """Order of the training rows. Default: group_by_length (like lengths in one batch); random on a GPU without padding."""

    shuffle_window: int = 50
    """Length grouping sorts within this many batches, not the whole epoch."""

    token_budget: int | None = None
    """Fill a training batch up to this many tokens instead of a fixed number of rows."""

    dataloader_num_workers: int = 0
    """Batches that a thread prepares ahead of the training step; 0: none, and 2 on a GPU."""

    dataloader_drop_last: bool = False
    """Leave out the last batch of an epoch when it is not full."""

    dataloader_pin_memory: bool = True
    """Pin batches in memory before they go to a GPU."""
