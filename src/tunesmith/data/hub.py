"""Datasets by name: a folder written by `save_to_disk`, or a dataset of the Hub. The `datasets` client downloads them
once; later they are read from disk. Every failure is one line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.data.read import is_saved_dataset, load_folder
from tunesmith.errors import ConfigError, DataError, ResourceError, TunesmithError, did_you_mean, short_text
from tunesmith.models.files import ask_hub, library_bars_off

if TYPE_CHECKING:
    from datasets import DatasetDict

log = logging.getLogger(__name__)
MOVED = {"glue": "nyu-mll/glue"}
"""Names that the Hub redirects. These also work offline. (datasets 5.2 refuses a bare name: HfUriError.)"""
WELL_KNOWN = ("glue", "nyu-mll/glue", "stanfordnlp/imdb", "CogComp/trec", "fancyzhx/ag_news", "stanfordnlp/sst2")


def load_by_name(name: str, config: str | None) -> Any:
    """Return the splits of a saved folder or of a Hub dataset."""
    folder = Path(name).expanduser()
    if folder.is_dir() and (is_saved_dataset(folder) or name.startswith((".", "/", "~"))):
        saved = load_folder(folder, name)
        return saved if isinstance(saved, Mapping) else {"train": saved}
    return load_dataset(name, config)


def load_dataset(dataset_name: str, config_name: str | None = None) -> DatasetDict:
    """Return all splits of a Hub dataset, memory-mapped; the copy on disk if the Hub is unreachable or offline mode is on."""
    import datasets

    name = MOVED.get(dataset_name, dataset_name)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name):
        raise ConfigError(
            f"{dataset_name!r} is not the name of a Hub dataset", fix="Use a name such as glue or owner/name."
        )
    reason = "offline mode is on"
    if not datasets.config.HF_HUB_OFFLINE:
        try:
            name = str(ask_hub("dataset", name, None, lambda: list(WELL_KNOWN)).id)  # behind redirects
        except ConnectionError as error:
            reason = str(error)
        else:
            return _download(name, config_name)
    for candidate in dict.fromkeys((name, dataset_name)):
        found = _from_disk(candidate, config_name)
        if found is not None:
            log.warning("%s comes from the copy on disk: %s", dataset_name, reason)
            return found
    title = f"{dataset_name} ({config_name})" if config_name else dataset_name
    fix = "Connect and run it once, or set --train_file to local files."
    raise ResourceError(f"the dataset {title} is not on this machine and {reason}", fix=fix)


def _download(name: str, config_name: str | None) -> DatasetDict:
    import datasets

    try:
        with library_bars_off(datasets, except_on_a_terminal=True):
            found: DatasetDict = datasets.load_dataset(name, config_name)
    except Exception as error:
        raise _explain(error, name, config_name) from error
    return found


def _explain(error: Exception, name: str, config_name: str | None) -> TunesmithError:
    from datasets.exceptions import DatasetNotFoundError, FileNotFoundDatasetsError

    text = str(error)
    if isinstance(error, ValueError) and ("BuilderConfig" in text or "Config name is missing" in text):
        listing = re.search(r"\[([^\]]*)\]", text.partition("vailable")[2])
        known = re.findall(r"'([^']+)'", listing[1]) if listing else []
        hint = did_you_mean(config_name, known) if config_name else None
        problem = f"has no config {config_name!r}" if config_name else "has several configs"
        listed = f"Set --dataset_config_name to one of: {', '.join(known)}"
        return ConfigError(f"the dataset {name} {problem}", fix=f"{hint} {listed}" if hint else listed)
    if isinstance(error, DatasetNotFoundError):
        fix = "Check the name; for a private dataset, run `hf auth login`."
        return ConfigError(f"the dataset {name} is not available: {short_text(error)}", fix=fix)
    title = f"{name} ({config_name})" if config_name else name
    empty = isinstance(error, ValueError) and "data file" in text  # the dataset card names files that don't exist
    if empty or isinstance(error, FileNotFoundDatasetsError):
        problem = f"the dataset {title} has no data files that can be read ({short_text(error)})"
        return DataError(problem, fix="Download its files and set --train_file.")
    if isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore", "huggingface_hub")):
        fix = "Run the same command again: finished parts of the download are kept."
        return ResourceError(f"the download of the dataset {name} was interrupted ({short_text(error)})", fix=fix)
    problem = f"the dataset {title} cannot be read ({short_text(error.__cause__ or error)})"
    return DataError(problem, fix="Download its files and set --train_file.")


def _from_disk(name: str, config_name: str | None) -> DatasetDict | None:
    """Return the newest complete copy in the cache of `datasets`; folders of broken downloads have no dataset_info.json."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    owner, _, short = name.rpartition("/")
    # the folder name that `datasets` uses: CamelCase becomes snake_case
    folder = datasets.naming.camelcase_to_snakecase(short)
    root = Path(datasets.config.HF_DATASETS_CACHE).expanduser()
    entries = (root / (f"{owner}___{folder}" if owner else folder)).glob("*/*/*/dataset_info.json")
    copies = [e.parent for e in entries if not e.parent.name.endswith(".incomplete")]
    copies = [c for c in copies if config_name in (None, c.parts[-3])]
    configs = sorted({c.parts[-3] for c in copies})
    if len(configs) > 1:
        fix = f"Set --dataset_config_name to one of: {', '.join(configs)}"
        raise ConfigError(f"the dataset {name} has several configs", fix=fix)
    if not copies:
        return None
    newest = max(copies, key=lambda c: c.stat().st_mtime)
    named = dict(zip(("config_name", "version", "hash"), newest.parts[-3:], strict=True))
    builder = Cache(cache_dir=str(root), dataset_name=folder, repo_id=name, **named)
    builder.download_and_prepare()
    found: DatasetDict = builder.as_dataset()
    return found
