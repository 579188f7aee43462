"""Datasets from the Hub with the `datasets` client: downloaded once, then from disk; every failure is one clear line."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import ConfigError, DataError, ResourceError, TunesmithError, did_you_mean, short_text
from tunesmith.run.environment import answer_within, library_bars_off

if TYPE_CHECKING:
    from datasets import DatasetDict

log = logging.getLogger(__name__)
MOVED = {"glue": "nyu-mll/glue"}
"""Names that the Hub redirects. Others are asked for; these work offline too. (datasets 5.2 refuses a bare name: HfUriError.)"""
WELL_KNOWN = ("glue", "nyu-mll/glue", "stanfordnlp/imdb", "CogComp/trec", "fancyzhx/ag_news", "stanfordnlp/sst2")
ASK_SECONDS = 4.0
"""How long the Hub may take for its first answer; without this `datasets` tries for 25 s and more."""


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
        raise ConfigError(f"{dataset_name!r} is no name of a Hub dataset")
    reason = "downloads are not allowed" if not allow_download else "offline mode is on"
    if allow_download and not datasets.config.HF_HUB_OFFLINE:
        try:
            name = _name_on_hub(name, revision, token)
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


def _name_on_hub(name: str, revision: str | None, token: str | None) -> str:
    """The full name behind redirects; ConnectionError when the Hub does not answer in time."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = answer_within(
            ASK_SECONDS, lambda: HfApi(token=token).dataset_info(name, revision=revision, timeout=ASK_SECONDS)
        )
    except GatedRepoError:
        raise ConfigError(
            f"the dataset {name} asks for permission", fix="Get access on its page and log in with `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"there is no Hub dataset named {name!r}",
            fix=did_you_mean(name, WELL_KNOWN) or "Private datasets need a token: `hf auth login`.",
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"the dataset {name} has no revision {revision!r}") from None
    except Exception as error:  # of httpx, httpx2 or the socket: the class differs by version
        raise ConnectionError(f"the Hub cannot be reached: {short_text(error)}") from error
    return str(info.id)


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
        return ConfigError(f"the dataset {name} cannot be had: {short_text(error)}")
    empty = isinstance(error, ValueError) and "data file" in text  # a card that names files which are not there
    if empty or isinstance(error, FileNotFoundDatasetsError):
        title = f"{name} ({config_name})" if config_name else name
        return DataError(f"the dataset {title} has no data files that can be read ({short_text(error)})")
    if isinstance(error, DatasetBuildError) or type(error).__name__.startswith("Arrow"):
        return DataError(f"the files of the dataset {name} cannot be read ({short_text(error.__cause__ or error)})")
    if isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore", "huggingface_hub")):
        return ResourceError(
            f"the download of the dataset {name} broke off ({short_text(error)})",
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
