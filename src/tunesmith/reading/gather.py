"""From what the user names (files, objects, a saved folder, a Hub dataset, a GLUE task) to one Source a split.

Datasets of the Hub come through the `datasets` client: downloaded once, then from disk; every failure is one clear line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import ConfigError, DataError, ResourceError, TunesmithError, did_you_mean, short_text
from tunesmith.reading.columns import find_glue_task
from tunesmith.reading.in_memory import holds_splits
from tunesmith.reading.read import is_saved_dataset, load_folder
from tunesmith.reading.source import Source
from tunesmith.reading.split import follow_split_column
from tunesmith.run.environment import ask_hub, library_bars_off

if TYPE_CHECKING:
    from datasets import DatasetDict

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
    """Splits under our names; those that are neither train, validation nor test are left out with a note."""
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
    raise ResourceError(
        f"the dataset {title} is not on this machine and {reason}",
        fix="Connect and run it once, or give local files with --train_file.",
    )


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
        return ResourceError(
            f"the download of the dataset {name} was interrupted ({short_text(error)})",
            fix="Run the same command again: what has arrived is kept.",
        )
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
        raise ConfigError(
            f"the dataset {name} has several configs", fix=f"--dataset_config_name takes one of: {', '.join(configs)}"
        )
    if not copies:
        return None
    newest = max(copies, key=lambda c: c.stat().st_mtime)
    config, version, digest = newest.parts[-3:]
    builder = Cache(
        cache_dir=str(root), dataset_name=folder, repo_id=name, config_name=config, version=version, hash=digest
    )
    builder.download_and_prepare()
    found: DatasetDict = builder.as_dataset()
    return found
