"""From what the user names (files, objects, a saved folder, a Hub dataset, a GLUE task) to one Source a split; a column of one
file may assign each of its rows to a split.

Datasets of the Hub come through the `datasets` client: downloaded once, then from disk; every failure is one clear line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import ConfigError, DataError, ResourceError, TunesmithError, did_you_mean, short_text
from tunesmith.reading.columns import find_glue_task
from tunesmith.reading.in_memory import holds_splits
from tunesmith.reading.read import is_saved_dataset, load_folder
from tunesmith.reading.source import Source
from tunesmith.run.environment import ask_hub, library_bars_off

if TYPE_CHECKING:
    from datasets import DatasetDict

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What a cell, or a dataset, calls a split -> our name."""
_MATCHED = {"validation_matched": "validation", "test_matched": "test"}


def gather_sources(
    given: Mapping[str, Any],
    *,
    task_name: str | None,
    dataset_name: str | None,
    dataset_config_name: str | None,
    split_names: Mapping[str, str],
    split_column_name: str | None,
    read: Callable[..., Source],
    hub_options: Mapping[str, Any],
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
        found = _rename(_load_dataset(dataset_name, dataset_config_name, hub_options), split_names, notes)
        splits = {**found, **named}
    elif task_name is not None:
        task = find_glue_task(task_name)
        found = load_from_hub("glue", task.name if task else None, **hub_options)
        splits = {**_rename(found, split_names, notes), **named}
    elif named:
        splits = named
    else:
        raise ConfigError("no data given", fix="Give --train_file, --dataset_name or --task_name.")
    if "train" not in splits:
        fix = "Give --train_file, or name the split train."
        raise DataError(f"there is no train split, only {', '.join(splits)}", fix=fix)
    first = [s for s in ("train", "validation", "test") if s in splits]
    sources = {s: read(splits[s], name=s) for s in [*first, *(s for s in splits if s not in first)]}
    return follow_split_column(sources, split_column_name, notes), notes


def _load_dataset(name: str, config: str | None, hub_options: Mapping[str, Any]) -> Any:
    folder = Path(name).expanduser()
    if folder.is_dir() and (is_saved_dataset(folder) or name.startswith((".", "/", "~"))):
        saved = load_folder(folder, name)
        return saved if isinstance(saved, Mapping) else {"train": saved}
    return load_from_hub(name, config, **hub_options)


def _rename(splits: Mapping[str, Any], asked: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """Splits under our names; those that are neither train, validation nor test are left out with a note."""
    for ours, theirs in asked.items():
        if theirs not in splits:
            fix = did_you_mean(theirs, tuple(splits))
            raise DataError(f"--{ours}_split_name: no split {theirs!r}; found: {', '.join(splits)}", fix=fix)
    ours_by_theirs = {theirs: ours for ours, theirs in asked.items()}
    renamed: dict[str, Any] = {}
    for split, data in splits.items():
        name = ours_by_theirs.get(split) or {**SPLITS, **_MATCHED}.get(split, split)
        displaced = split not in ours_by_theirs and name in asked
        if displaced or not name.startswith(("train", "validation", "test")):
            notes.append(f"Split {split!r} is not used.")
        elif name in renamed:
            raise DataError(f"two splits are called {name}", fix="Rename one of them.")
        else:
            renamed[name] = data
    return renamed


SPLIT_COLUMNS = ("split", "set", "subset", "partition", "fold")


def follow_split_column(sources: Mapping[str, Source], asked: str | None, notes: list[str]) -> dict[str, Source]:
    """The splits of one file by its own column: `asked`, or one with a usual name whose cells are all names of splits.

    "none" follows no column. Where a validation or test file is given, or cells are something else, nothing is followed.
    """
    train = sources.get("train")
    if train is None or asked == "none":
        return dict(sources)
    if asked is not None and asked not in train.column_names:
        problem = f"--split_column_name: no column {asked!r}; found: {', '.join(train.column_names)}"
        raise DataError(problem, where=train.origin, fix=did_you_mean(asked, train.column_names))
    if asked is not None and len(sources) > 1:
        raise ConfigError("--split_column_name is about one file with all rows", fix="Give --train_file alone.")
    name = asked or next((n for n in train.column_names if n.lower().strip() in SPLIT_COLUMNS), None)
    if name is None:
        return dict(sources)
    cells = [str(cell).strip().lower() for cell in train.dataset.with_format(None)[name]]
    found = dict.fromkeys(cells)
    unknown = [cell for cell in found if cell not in SPLITS]
    if unknown or "train" not in map(SPLITS.get, found) or len(sources) > 1:
        if asked is not None:
            what = f"has {', '.join(map(repr, unknown[:4]))}" if unknown else "has no train rows"
            fix = "Its cells say train, validation (valid, val, dev) or test."
            raise DataError(f"column {name!r} {what}", where=train.origin, fix=fix)
        if len(found) > 1 and any("train" in cell for cell in found):
            shown = ", ".join(sorted(found)[:4])
            notes.append(f"Column {name!r} ({shown}) is not followed: all rows of the file are training data.")
        return dict(sources)
    if len(set(map(SPLITS.get, found))) == 1:
        return dict(sources)
    rows: dict[str, list[int]] = {split: [] for split in ("train", "validation", "test")}
    for row, cell in enumerate(cells):
        rows[SPLITS[cell]].append(row)
    counts = ", ".join(f"{len(rows[split]):,} {split}" for split in rows if rows[split])
    followed = f"Column {name!r} gives the split of each row: {counts} rows"
    notes.append(f"{followed} (--split_column_name none: not followed).")
    picked = {split: train.dataset.select(numbers) for split, numbers in rows.items() if numbers}
    return {split: replace(train, name=split, dataset=some, table_file=None) for split, some in picked.items()}


log = logging.getLogger(__name__)
MOVED = {"glue": "nyu-mll/glue"}
"""Names that the Hub redirects. Others are asked for; these work offline too. (datasets 5.2 refuses a bare name: HfUriError.)"""
WELL_KNOWN = ("glue", "nyu-mll/glue", "stanfordnlp/imdb", "CogComp/trec", "fancyzhx/ag_news", "stanfordnlp/sst2")


def load_from_hub(
    dataset_name: str,
    config_name: str | None = None,
    *,
    token: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    allow_download: bool = True,
) -> DatasetDict:
    """All splits of a Hub dataset, memory-mapped. When the Hub is out of reach (or not allowed), the copy on disk."""
    import datasets

    name = MOVED.get(dataset_name, dataset_name)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name):
        raise ConfigError(f"{dataset_name!r} is not the name of a Hub dataset")
    reason = "downloads are not allowed" if not allow_download else "offline mode is on"
    if allow_download and not datasets.config.HF_HUB_OFFLINE:
        try:
            name = str(ask_hub("dataset", name, revision, token, lambda: list(WELL_KNOWN)).id)  # behind redirects
        except ConnectionError as error:
            reason = str(error)
        else:
            return _download(name, config_name, token=token, revision=revision, cache_dir=cache_dir)
    for candidate in dict.fromkeys((name, dataset_name)):
        found = _from_disk(candidate, config_name, revision, cache_dir)
        if found is not None:
            log.warning("%s comes from the copy on disk: %s", dataset_name, reason)
            return found
    title = f"{dataset_name} ({config_name})" if config_name else dataset_name
    fix = "Connect and run it once, or give local files with --train_file."
    raise ResourceError(f"the dataset {title} is not on this machine and {reason}", fix=fix)


def _download(name: str, config_name: str | None, **options: Any) -> DatasetDict:
    import datasets

    options["cache_dir"] = None if options["cache_dir"] is None else str(options["cache_dir"])
    try:
        with library_bars_off(datasets, except_on_a_terminal=True):
            found: DatasetDict = datasets.load_dataset(name, config_name, **options)
    except Exception as error:
        raise _explain(error, name, config_name) from error
    return found


def _explain(error: Exception, name: str, config_name: str | None) -> TunesmithError:
    from datasets.exceptions import DatasetBuildError, DatasetNotFoundError, FileNotFoundDatasetsError

    text = str(error)
    if isinstance(error, ValueError) and ("BuilderConfig" in text or "Config name is missing" in text):
        listing = re.search(r"\[([^\]]*)\]", text.partition("vailable")[2])
        known = re.findall(r"'([^']+)'", listing[1]) if listing else []
        hint = did_you_mean(config_name, known) if config_name else None
        problem = f"has no config {config_name!r}" if config_name else "has several configs"
        listed = f"--dataset_config_name takes one of: {', '.join(known)}"
        return ConfigError(f"the dataset {name} {problem}", fix=f"{hint} {listed}" if hint else listed)
    if isinstance(error, DatasetNotFoundError):
        return ConfigError(f"the dataset {name} is not available: {short_text(error)}")
    empty = isinstance(error, ValueError) and "data file" in text  # a card that names files which are not there
    if empty or isinstance(error, FileNotFoundDatasetsError):
        title = f"{name} ({config_name})" if config_name else name
        return DataError(f"the dataset {title} has no data files that can be read ({short_text(error)})")
    if isinstance(error, DatasetBuildError) or type(error).__name__.startswith("Arrow"):
        return DataError(f"the files of the dataset {name} cannot be read ({short_text(error.__cause__ or error)})")
    if isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore", "huggingface_hub")):
        fix = "Run the same command again: what has arrived is kept."
        return ResourceError(f"the download of the dataset {name} was interrupted ({short_text(error)})", fix=fix)
    return DataError(f"the dataset {name} cannot be loaded ({type(error).__name__}: {short_text(error)})")


def _from_disk(
    name: str, config_name: str | None, revision: str | None, cache_dir: str | Path | None
) -> DatasetDict | None:
    """The newest complete copy in the cache of `datasets`; folders of broken downloads have no dataset_info.json."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, short = name.rpartition("/")
    # the folder name that `datasets` gives: CamelCase becomes snake_case
    folder = datasets.naming.camelcase_to_snakecase(short)
    root = Path(cache_dir if cache_dir is not None else datasets.config.HF_DATASETS_CACHE).expanduser()
    entries = (root / (f"{owner}___{folder}" if owner else folder)).glob("*/*/*/dataset_info.json")
    copies = [e.parent for e in entries if not e.parent.name.endswith(".incomplete")]
    copies = [c for c in copies if config_name in (None, c.parts[-3]) and revision in (None, "main", c.name)]
    configs = sorted({c.parts[-3] for c in copies})
    if len(configs) > 1:
        fix = f"--dataset_config_name takes one of: {', '.join(configs)}"
        raise ConfigError(f"the dataset {name} has several configs", fix=fix)
    if not copies:
        return None
    newest = max(copies, key=lambda c: c.stat().st_mtime)
    named = dict(zip(("config_name", "version", "hash"), newest.parts[-3:], strict=True))
    builder = Cache(cache_dir=str(root), dataset_name=folder, repo_id=name, **named)
    builder.download_and_prepare()
    found: DatasetDict = builder.as_dataset()
    return found
