"""Text columns -> token rows: one batched `Dataset.map`, cached by content, every cut token counted."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tunesmith.errors import ConfigError, DataError, WorkerError
from tunesmith.run.environment import library_bars_off
from tunesmith.run.writing import write_new
from tunesmith.tokens.token_cache import TokenCache, content_hash, default_token_cache, release_pages
from tunesmith.tokens.token_encoder import UNKNOWN, TokenEncoder, make_token_encoder, require_text_cells
from tunesmith.tokens.token_rows import TokenRows
from tunesmith.tokens.truncation import LongTexts, TruncationCount

if TYPE_CHECKING:
    from datasets import Dataset

    from tunesmith.reading.columns import Columns

VERSION = 3
"""Part of every cache key: raise it when the stored columns or their meaning change."""
BATCH_ROWS = 1000
USUAL_LENGTH = 512
LONGEST_LENGTH = 8192
"""Of a row, where all that the model takes is asked for: some models set no limit."""

OnProgress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One split, tokenized. `dataset` holds the same rows on disk; `reused` says that they came from the cache."""

    rows: TokenRows
    truncated: TruncationCount
    dataset: Dataset
    reused: bool = False
    empty: tuple[int, ...] = ()
    """Rows of which the model sees special tokens alone."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What the worker needs to turn a batch of rows into tokens."""

    encoder: TokenEncoder
    text: tuple[str, ...]
    has_types: bool

    def key(self, dataset: Dataset) -> str:
        labels = ("labels",) if "labels" in dataset.column_names else ()
        content = content_hash(dataset, (*self.text, *labels))
        parts = (content, self.encoder.fingerprint, self.text, self.has_types, VERSION)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def tokenize(
    dataset: Dataset,
    tokenizer: Any,
    columns: Columns | Sequence[str],
    *,
    max_length: int,
    long_texts: LongTexts = "head",
    num_proc: int | None = None,
    cache_dir: str | Path | None = None,
    overwrite_cache: bool = False,
    vocab_size: int | None = None,
    on_progress: OnProgress | None = None,
) -> Tokenized:
    """The rows as `tokenizer(*texts, truncation=True, max_length=max_length)` gives them, unpadded; "labels" is kept.
    `long_texts`: what is kept of a row that is too long. `num_proc=None`: the Rust core uses all cores (why:
    bench/tokenize_speed.py). `vocab_size`: token embeddings of the model; an id beyond them is a DataError.
    """
    text = tuple(columns if isinstance(columns, Sequence) else columns.text)
    _check(dataset, tokenizer, text, max_length)
    encoder = make_token_encoder(tokenizer, max_length, long_texts)
    job = _Job(encoder, text, "token_type_ids" in tokenizer.model_input_names)
    cache, key = TokenCache(Path(cache_dir) if cache_dir is not None else default_token_cache()), job.key(dataset)
    if overwrite_cache:
        cache.remove(key)
    found = cache.open(key)
    stored, facts = found or cache.build(key, partial(_write, dataset, job, num_proc, on_progress), _facts)
    release_pages(dataset)
    if on_progress is not None:
        on_progress(len(dataset), len(dataset))
    largest = max(facts["max_id"], getattr(tokenizer, "pad_token_id", None) or 0)
    if vocab_size is not None and largest >= vocab_size:
        problem = f"the tokenizer makes token id {largest}, but the model has only {vocab_size} token embeddings"
        raise DataError(problem, fix="Use the tokenizer that belongs to the model.")
    sides = None if facts["second_cut"] == UNKNOWN else (facts["tokens_cut"] - facts["second_cut"], facts["second_cut"])
    longest = max_length if encoder.windows is None else encoder.windows.longest
    cut = (facts["rows_cut"], facts["tokens_cut"], sides and sides[: len(text)])
    truncated = TruncationCount(len(stored), *cut, longest, facts["unread"])
    known = _unpack_ids(facts["used_ids"])
    rows = TokenRows.from_arrow(stored.data.table, known_ids=known).in_windows(encoder.windows)
    empty = np.flatnonzero(rows.lengths <= tokenizer.num_special_tokens_to_add(pair=len(text) == 2))
    release_pages(stored)  # lengths and labels were copied out: their pages, and those read along with them
    return Tokenized(rows, truncated, stored, reused=found is not None, empty=tuple(empty.tolist()))


def longest_allowed(
    tokenizer: Any, *, model_max: int | None = None, asked: int | None = None, usual: int = USUAL_LENGTH
) -> int:
    """The row length to use: what was asked for, else `usual`, and never more than the model and the tokenizer take."""
    # transformers says 1e30 for "unknown"
    limits = [int(n) for n in (model_max, tokenizer.model_max_length) if n is not None and 0 < n < 10_000_000]
    return min([usual if asked is None else asked, *limits])


def _check(dataset: Dataset, tokenizer: Any, text: tuple[str, ...], max_length: int) -> None:
    missing = [name for name in text if name not in dataset.column_names]
    if missing or len(text) not in (1, 2):
        fix = f"Name one or two of: {', '.join(dataset.column_names)}."
        raise DataError(f"cannot tokenize the columns {', '.join(text) or '(none)'}", fix=fix)
    if len(dataset) == 0:
        raise DataError("there are no rows to tokenize")
    least = tokenizer.num_special_tokens_to_add(pair=len(text) == 2) + len(text)
    if max_length < least:  # transformers gives such rows uncut, without a word
        fix = f"Use {least} or more: the special tokens and one token for each text."
        raise ConfigError(f"max_length {max_length} leaves no room for text", fix=fix)


def _write(dataset: Dataset, job: _Job, num_proc: int | None, on_progress: OnProgress | None, folder: Path) -> None:
    import datasets
    from datasets import Features, List, Value

    features: dict[str, Any] = {"input_ids": List(Value("int32"))}
    if job.has_types:
        features["token_type_ids"] = List(Value("int8"))
    features.update({name: Value("int32") for name in ("length", "cut", "cut_second")})
    features["unread"] = Value("bool")
    labels = ["labels"] if "labels" in dataset.column_names else []
    if labels:
        features["labels"] = dataset.features["labels"]
    processes = None if num_proc is None or num_proc < 2 else min(num_proc, len(dataset))
    # `on_progress` shows how far it is; a second bar of `datasets` would draw over it.
    with library_bars_off(datasets), _unchanged_environment("TOKENIZERS_PARALLELISM"), naming_map_workers(folder):
        dataset.select_columns([*job.text, *labels]).with_format("arrow").map(
            partial(
                _tokenize_table,
                job=job,
                total=len(dataset),
                on_progress=None if processes else on_progress,
                notes=folder if processes else None,
            ),
            batched=True,
            with_indices=True,
            batch_size=BATCH_ROWS,
            remove_columns=list(job.text),
            features=Features(features),
            num_proc=processes,
            cache_file_name=str(folder / "rows.arrow"),
            load_from_cache_file=False,
            new_fingerprint=job.encoder.fingerprint[:32],
        )


def _tokenize_table(
    table: pa.Table, indices: list[int], *, job: _Job, total: int, on_progress: OnProgress | None, notes: Path | None
) -> pa.Table:
    if notes is not None:
        note_rows(notes, indices)
    texts = [table.column(name).to_pylist() for name in job.text]
    for name, cells in zip(job.text, texts, strict=True):
        require_text_cells(cells, indices[0], f", column {name}")
    rows = job.encoder.encode(texts)
    out = {"input_ids": pa.array([r.ids for r in rows], pa.list_(pa.int32()))}
    if job.has_types:
        out["token_type_ids"] = pa.array([r.types for r in rows], pa.list_(pa.int8()))
    out["length"] = pa.array([len(r.ids) for r in rows], pa.int32())
    out["cut"] = pa.array([r.cut for r in rows], pa.int32())
    out["cut_second"] = pa.array([r.cut_second for r in rows], pa.int32())
    out["unread"] = pa.array([r.unread for r in rows], pa.bool_())
    if "labels" in table.column_names:
        out["labels"] = table.column("labels")
    if on_progress is not None:
        on_progress(indices[-1] + 1, total)
    return pa.table(out)


def _facts(files: Sequence[Path]) -> dict[str, Any]:
    """What every later use asks of the entry, counted once from the rows as they were stored.

    Read as a stream: through the memory map, all pages of the file would count as memory of this process.
    """
    rows_cut, tokens_cut, second_cut, unread, unknown = 0, 0, 0, 0, False
    used = np.zeros(1, dtype=bool)
    for file in files:
        with pa.OSFile(str(file)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                ids = batch.column("input_ids").flatten().to_numpy()
                cut, second = batch.column("cut").to_numpy(), batch.column("cut_second").to_numpy()
                used = np.pad(used, (0, max(0, int(ids.max(initial=0)) + 1 - len(used))))
                used[ids] = True
                rows_cut += int((cut > 0).sum())
                tokens_cut += int(cut.sum(dtype=np.int64))
                second_cut += int(second.sum(dtype=np.int64))
                unknown = unknown or bool((second == UNKNOWN).any())
                unread += batch.column("unread").true_count
    return {
        "max_id": len(used) - 1,
        "used_ids": base64.b64encode(np.packbits(used).tobytes()).decode(),
        "rows_cut": rows_cut,
        "tokens_cut": tokens_cut,
        "second_cut": UNKNOWN if unknown else second_cut,
        "unread": unread,
    }


def _unpack_ids(packed: str) -> npt.NDArray[np.int64]:
    """The sorted ids of a bit map, one bit an id, as `_facts` writes it."""
    bits = np.frombuffer(base64.b64decode(packed), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits))


@contextmanager
def _unchanged_environment(name: str) -> Iterator[None]:
    # `Dataset.map(num_proc=...)` leaves TOKENIZERS_PARALLELISM=false behind: every later call would use one core.
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ[name] = before or ""
        if before is None:
            del os.environ[name]


_WORKER_NOTE = "rows-of-worker-"


def note_rows(folder: Path, indices: Sequence[int]) -> None:
    """Leaves a note of the rows that this process works on now; one that is killed can say nothing later."""
    note = folder / f"{_WORKER_NOTE}{os.getpid()}"
    note.unlink(missing_ok=True)
    write_new(note, f"{indices[0] + 1}-{indices[-1] + 1}".encode())


@contextmanager
def naming_map_workers(folder: Path) -> Iterator[None]:
    """Inside, the death of a process of `map` becomes a WorkerError with the rows that were under way."""
    try:
        yield
    except RuntimeError as error:
        if "abruptly died" not in str(error):  # datasets' words; it has no class for it
            raise
        notes = {
            note.name.removeprefix(_WORKER_NOTE): note.read_text() for note in sorted(folder.glob(f"{_WORKER_NOTE}*"))
        }
        had = ", ".join(f"process {pid} rows {rows}" for pid, rows in notes.items())
        problem = f"a preprocessing worker died while it tokenized ({had or 'before its first rows'})"
        fix = "Memory may have run out, or a text ended it. Give a smaller --preprocessing_num_workers or leave it out."
        raise WorkerError(problem, fix=fix) from error
    finally:
        for note in folder.glob(f"{_WORKER_NOTE}*"):
            note.unlink()
