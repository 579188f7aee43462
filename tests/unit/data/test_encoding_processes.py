"""Texts tokenized in processes: the tokens, the counts and the order of one process, and errors instead of dead pipes."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patience import patient
from tiny_model import save_tiny_bert, sentences
from tunesmith.data import encoding_processes
from tunesmith.data.encoding_processes import LEAST_ROWS, PIECE_ROWS, ChunkEncoder
from tunesmith.data.token_encoder import make_token_encoder
from tunesmith.errors import DataError, WorkerError
from tunesmith.inference.predictor import Predictor, chunks_of
from tunesmith.models.files import load_tokenizer

ROWS = LEAST_ROWS + PIECE_ROWS // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("model"), labels=("bad", "good"), initializer_range=0.2)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All different, some longer than the model, one so long that its end is not read."""
    found = [" ".join([text] * (1 + i % 9)) + f" {i}" for i, (text, _) in enumerate(sentences(ROWS))]
    found[700] = "one day " * 40_000
    return found


def make(folder: Path, processes: int, long_texts: Any = "head") -> ChunkEncoder:
    encoder = make_token_encoder(load_tokenizer(folder), 64, long_texts)
    return ChunkEncoder(encoder, has_types=True, processes=processes)


def wait_for_processes(shared: ChunkEncoder, texts: list[list[str]]) -> None:
    """Until every process has started: before that, rows may be encoded in this one."""
    deadline = time.monotonic() + patient(60)
    while shared._crew is None or shared._crew.starting:
        shared.encode(texts)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("long_texts", ["head", "head_tail"])
def test_processes_give_the_rows_and_counts_of_one_process(
    folder: Path, texts: list[str], long_texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make(folder, 0, long_texts)
    shared = make(folder, 2, long_texts)
    wait_for_processes(shared, [texts])
    monkeypatch.setattr(shared, "encode_here", None)  # from here on, all rows come from the processes
    for columns in ([texts], [texts, texts[::-1]]):
        (expected, cut), (found, found_cut) = alone.encode(columns), shared.encode(columns)
        assert len(found.columns["input_ids"].chunks) > 1
        assert found_cut == cut
        assert cut.rows > 100
        assert cut.unread >= 1
        np.testing.assert_array_equal(found.lengths, expected.lengths)
        every = np.arange(len(texts))
        for name, rows in expected.take(every).items():
            for one, other in zip(rows, found.take(every)[name], strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype


def test_a_predictor_gives_the_same_bits_with_processes(folder: Path, texts: list[str]) -> None:
    predictor = Predictor.load(folder, use_cpu=True)
    expected = predictor.predict_texts(chunks_of([texts]))
    predictor.network.chunks = make(folder, 1)
    wait_for_processes(predictor.network.chunks, [texts])
    found = predictor.predict_texts(chunks_of([texts]))
    np.testing.assert_array_equal(found.logits, expected.logits)
    assert (found.truncated, found.empty) == (expected.truncated, expected.empty)


def test_few_rows_start_no_process(folder: Path, texts: list[str]) -> None:
    shared = make(folder, 2)
    shared.encode([texts[: LEAST_ROWS - 1]])
    assert shared._crew is None


def test_a_dead_process_is_an_error_and_the_next_call_works(folder: Path, texts: list[str]) -> None:
    shared = make(folder, 1)
    wait_for_processes(shared, [texts])
    assert shared._crew is not None
    [(_, process)] = shared._crew.end.peek()[2][0]
    process.kill()
    process.wait()
    with pytest.raises(WorkerError, match="died"):
        shared.encode([texts])
    found, _ = shared.encode([texts])
    assert len(found) == len(texts)


def test_an_error_in_a_process_arrives_here(folder: Path, texts: list[str]) -> None:
    shared = make(folder, 1)
    wait_for_processes(shared, [texts])
    with pytest.raises(DataError, match="tokenizer failed"):
        shared.encode([[*texts[1:], "half of a character: \ud83d"]])


def test_processes_that_cannot_start_leave_the_work_to_this_one(
    folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_processes, "_PROGRAM", "raise SystemExit(3)")
    found, _ = make(folder, 2).encode([texts])
    assert len(found) == len(texts)


def test_processes_end_with_their_encoder_but_not_with_a_fork(folder: Path, texts: list[str]) -> None:
    shared = make(folder, 2)
    wait_for_processes(shared, [texts])
    assert shared._crew is not None
    processes = [process for _, process in shared._crew.end.peek()[2][0]]
    child = os.fork()
    if child == 0:  # what a forked data loader does: it holds the same object, and drops it
        shared._crew.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert [process.poll() for process in processes] == [None, None]
    assert len(shared.encode([texts])[0]) == len(texts)
    del shared
    gc.collect()
    assert all(process.poll() is not None for process in processes)
