"""The data of a run and the folder of its model: everything that can be found wrong before torch is imported.

Options that the config knows and this build cannot carry out are refused, never passed over in silence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.audit.row_audit import audit_rows, require_clean
from tunesmith.config.load import raise_problems
from tunesmith.config.schema import RunConfig
from tunesmith.encoder.config_file import HeadNames, read_config_file, read_head_names
from tunesmith.encoder.resolve import resolve_model
from tunesmith.errors import ConfigError
from tunesmith.labels import Task
from tunesmith.ranks.sharding import read_sharding
from tunesmith.reading.load import DataBundle, load_data
from tunesmith.session.watch import ShowProgress

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
    "sheet_name",
    "max_train_samples",
    "max_eval_samples",
    "max_predict_samples",
    "label_separator",
    "positive_label",
    "merge_label_variants",
    "split_column_name",
    "skip_bad_rows",
    "allow_single_label",
    "allow_empty_text",
    "labels_file",
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
    config: RunConfig,
    data: Mapping[str, Any],
    progress: ShowProgress,
    *,
    need_weights: bool = True,
    use_test: bool = True,
) -> RunData:
    """Finds the model, then reads the data with its labels in the order of the model's head, if it has one."""
    folder = resolve_model(
        config.model_name_or_path,
        revision=config.model_revision,
        cache_dir=config.cache_dir,
        allow_download=config.allow_download,
        need_weights=need_weights,
    )
    head = read_head_names(read_config_file(folder))
    given: dict[str, Any] = {name: getattr(config, name) for name in PLAIN_OPTIONS}
    given |= {f"{split}_data": rows for split, rows in data.items()}
    splits = {split: getattr(config, f"{split}_split_name") for split in ("train", "validation", "test")}
    bundle = load_data(
        **given,
        fold=None if config.fold is None else (config.fold, config.folds or config.fold),
        seed=config.seed if config.data_seed is None else config.data_seed,
        split_names={split: name for split, name in splits.items() if name is not None},
        hub_options={"allow_download": config.allow_download},
        head_names=head.names,
        on_progress=lambda done, total: progress("reading", done, total),
    )
    if not use_test:
        rows, parts = dict(bundle.splits), dict(bundle.parts)
        rows.pop("test", None), parts.pop("test", None)
        bundle = replace(bundle, splits=rows, parts=parts)
    found = _match_head(bundle, folder, head, allow_new=config.ignore_mismatched_sizes)
    findings = audit_rows(bundle.parts, bundle.columns, bundle.labels, names_given=bundle.names_given)
    require_clean(findings, strict=config.strict_data)
    return replace(found, bundle=replace(bundle, findings=tuple(findings)))


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


_FIXES = {
    "config_name": "Leave it out: the config of the model is used.",
    "torch_compile": "Leave it out: the exact speed-ups are on by themselves.",
    "save_only_model": "Leave it out: a checkpoint holds all that a resume needs; model/ holds the weights alone.",
    "weights_only": "Give --model_name_or_path RUN/best instead, to start from those weights.",
    "eval_on_start": "Leave it out, or run `tunesmith evaluate` on the model first.",
}


def refuse_what_is_not_built(config: RunConfig, *, one_of_many: bool = False) -> None:
    """A ConfigError with every option asked for that has no effect in `tunesmith train`.

    `one_of_many`: the run is one of those that `--recipe best` consists of.
    """
    problems = [f"--{name} is not built in. {fix}" for name, fix in _FIXES.items() if getattr(config, name)]
    problems += [
        f"--report_to {name} needs the package {name}. pip install 'tunesmith[trackers]', or leave it out: "
        "journal.jsonl has every number."
        for name in config.report_to
        if name not in ("none", "all") and not is_installed(name)
    ]
    if config.recipe == "best" and not one_of_many:
        problems.append(
            "--recipe best trains several models. Use `tunesmith train`, or run_best of tunesmith.tuning.best_model."
        )
    elif config.time_budget is not None and not one_of_many:
        problems.append(
            "--time_budget is not built in for a single run. It is for --recipe best and `tunesmith search`."
        )
    if isinstance(config.resume_from_checkpoint, str):
        problems.append(
            "--resume_from_checkpoint FOLDER is not built in. Leave FOLDER out: the newest sound checkpoint is taken."
        )
    try:
        read_sharding(config.fsdp, config.fsdp_config)
    except ConfigError as error:
        problems += error.problems or (error.line(),)
    raise_problems(problems)


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name (W&B makes ./wandb) is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
