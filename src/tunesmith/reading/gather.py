"""From what the user names (files, objects, a saved folder, a Hub dataset, a GLUE task) to one Source a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, DataError, did_you_mean
from tunesmith.reading.glue_tasks import find_glue_task
from tunesmith.reading.in_memory import holds_splits
from tunesmith.reading.read import is_saved_dataset, load_folder
from tunesmith.reading.source import Source
from tunesmith.reading.split_column import follow_split_column

Reader = Callable[[Any, str], Source]
HubLoader = Callable[[str, str | None], Any]

_ALIASES = {
    "val": "validation",
    "valid": "validation",
    "dev": "validation",
    "eval": "validation",
    "validation_matched": "validation",
    "test_matched": "test",
}


def gather_sources(
    given: Mapping[str, Any],
    *,
    task_name: str | None,
    dataset_name: str | None,
    dataset_config_name: str | None,
    split_names: Mapping[str, str],
    split_column_name: str | None,
    read: Reader,
    load_hub: HubLoader,
) -> tuple[dict[str, Source], list[str]]:
    """The splits in the order train, validation, test, then others, and notes on what was left out.

    `given` are files or objects by split; they go before a dataset, and that before a task's own data on the Hub.
    `split_names` say what our splits are called in a dataset with splits of its own.
    """
    notes: list[str] = []
    named = {split: source for split, source in given.items() if source is not None}
    whole = named.get("train")
    if isinstance(whole, Mapping) and holds_splits(whole):
        if len(named) > 1:
            raise ConfigError("the train data is a DatasetDict with its own splits: give no other data beside it")
        splits = _rename(whole, split_names, notes)
    elif whole is not None:
        splits = named
    elif dataset_name is not None:
        found = _rename(_load_dataset(dataset_name, dataset_config_name, load_hub), split_names, notes)
        splits = {**found, **named}
    elif task_name is not None:
        task = find_glue_task(task_name)
        splits = {**_rename(load_hub("glue", task.name if task else None), split_names, notes), **named}
    elif named:
        splits = named
    else:
        raise ConfigError("no data given", fix="Give --train_file, --dataset_name or --task_name.")
    if "train" not in splits:
        raise DataError(
            f"there is no train split, only {', '.join(splits)}", fix="Give --train_file, or name the split train."
        )
    first = [s for s in ("train", "validation", "test") if s in splits]
    sources = {s: read(splits[s], s) for s in [*first, *(s for s in splits if s not in first)]}
    return follow_split_column(sources, split_column_name, notes), notes


def _load_dataset(name: str, config: str | None, load_hub: HubLoader) -> Any:
    folder = Path(name).expanduser()
    if folder.is_dir() and (is_saved_dataset(folder) or name.startswith((".", "/", "~"))):
        saved = load_folder(folder, name)
        return saved if isinstance(saved, Mapping) else {"train": saved}
    return load_hub(name, config)


def _rename(splits: Mapping[str, Any], asked: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """Splits under our names; those that are neither train, validation nor test are left out, and said so."""
    for ours, theirs in asked.items():
        if theirs not in splits:
            fix = did_you_mean(theirs, tuple(splits))
            raise DataError(f"--{ours}_split_name: no split {theirs!r}; found: {', '.join(splits)}", fix=fix)
    ours_by_theirs = {theirs: ours for ours, theirs in asked.items()}
    renamed: dict[str, Any] = {}
    for split, data in splits.items():
        name = ours_by_theirs.get(split) or _ALIASES.get(split, split)
        if split not in ours_by_theirs and name in asked:
            notes.append(f"Split {split!r} is not used.")
            continue
        if not name.startswith(("train", "validation", "test")):
            notes.append(f"Split {split!r} is not used.")
        elif name in renamed:
            raise DataError(f"two splits are called {name}", fix="Rename one of them.")
        else:
            renamed[name] = data
    return renamed
