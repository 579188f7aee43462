from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from datasets import Dataset, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from patience import patient
from tunesmith.data import tokenize as tokenizing
from tunesmith.data.cache import RowCache, content_hash
from tunesmith.data.tokenize import RustEncoder, call_within, describe_lowered_length, longest_allowed, tokenize
from tunesmith.errors import ConfigError, DataError, ResourceError, WorkerError
from tunesmith.runs.manifest import MANIFEST

SHARED = Path(__file__).parents[4] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared models and data are not beside the checkout")

WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "ran", "far", "away", "from", "home"]
WORDS += ["and", "then", "it", "came", "back", "to", "us"]
PAIRS = {
    "first": ["the cat sat on the mat", "the dog ran far away from home and then it came back to us", "a cat", ""],
    "second": ["a cat sat", "the dog ran away", "the dog ran far away from home and then it came back", "it"],
    "labels": [1, 0, 1, -1],
}


def make_tokenizer(*, types: bool = True, side: str = "right") -> Any:
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=names,
        truncation_side=side,
    )


@pytest.fixture
def pairs() -> Dataset:
    return Dataset.from_dict(PAIRS)


@pytest.mark.parametrize("max_length", [5, 6, 9, 13, 64])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", [("first",), ("first", "second")])
def test_rows_equal_the_tokenizer_with_truncation(
    pairs: Dataset, tmp_path: Path, max_length: int, side: str, text: tuple[str, ...]
) -> None:
    tokenizer = make_tokenizer(side=side)
    got = tokenize(pairs, tokenizer, text, max_length=max_length, cache_dir=tmp_path)
    texts = [PAIRS[name] for name in text]
    want = tokenizer(*texts, truncation=True, max_length=max_length)
    whole = tokenizer(*texts)
    assert got.dataset["input_ids"][:] == want["input_ids"]
    assert got.dataset["token_type_ids"][:] == want["token_type_ids"]
    assert got.dataset["length"][:] == [len(r) for r in want["input_ids"]]
    assert got.rows.lengths.tolist() == got.dataset["length"][:]
    assert got.rows.labels is not None
    assert got.rows.labels.tolist() == [1, 0, 1, -1]
    lost = [len(a) - len(b) for a, b in zip(whole["input_ids"], want["input_ids"], strict=True)]
    assert got.truncated.tokens_cut == sum(lost)
    assert got.truncated.rows_cut == sum(n > 0 for n in lost)
    assert got.truncated.tokens_cut == sum(lost)


TEXTS = st.lists(st.sampled_from([*WORDS, "zebra", "[SEP]"]), max_size=30).map(" ".join)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), st.integers(5, 40), st.sampled_from(["left", "right"])
)
def test_any_pair_is_cut_as_the_tokenizer_cuts_it(rows: list[tuple[str, str]], max_length: int, side: str) -> None:
    tokenizer = make_tokenizer(side=side)
    encoder = RustEncoder(tokenizer, max_length)
    first, second = [list(column) for column in zip(*rows, strict=True)]
    for texts in ([first], [first, second]):
        want = tokenizer(*texts, truncation=True, max_length=max_length)
        got = encoder.encode(texts)
        assert [r.ids for r in got] == want["input_ids"]
        assert [r.types for r in got] == want["token_type_ids"]


def test_truncated_rows_and_tokens_are_counted(tmp_path: Path) -> None:
    data = Dataset.from_dict({"a": ["cat"] * 3, "b": ["the cat sat on the mat"] * 3})
    got = tokenize(data, make_tokenizer(), ("a", "b"), max_length=8, cache_dir=tmp_path)
    assert got.truncated.tokens_cut == 6
    assert got.truncated.sentence("test") == ("test: 3 of 3 rows (100.0%) were truncated to 8 tokens, 6 tokens lost")
    assert got.rows.labels is None


def test_a_tokenizer_without_types_gives_none(pairs: Dataset, tmp_path: Path) -> None:
    got = tokenize(pairs, make_tokenizer(types=False), ("first", "second"), max_length=64, cache_dir=tmp_path)
    assert "token_type_ids" not in got.dataset.column_names
    assert set(got.rows.columns) == {"input_ids"}


def test_a_second_run_does_not_call_the_tokenizer(
    pairs: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenize(pairs, make_tokenizer(), ("first", "second"), max_length=9, cache_dir=tmp_path)
    monkeypatch.setattr(RustEncoder, "encode", lambda *_: pytest.fail("the tokenizer was called"))
    moved = Dataset.from_dict(PAIRS)  # equal content, another object
    again = tokenize(moved, make_tokenizer(), ("first", "second"), max_length=9, cache_dir=tmp_path)
    assert again.reused
    assert not first.reused
    assert again.truncated == first.truncated
    monkeypatch.undo()
    assert not tokenize(
        moved, make_tokenizer(), ("first", "second"), max_length=9, cache_dir=tmp_path, overwrite_cache=True
    ).reused
    assert again.dataset["input_ids"][:] == first.dataset["input_ids"][:]


def test_everything_that_changes_the_rows_changes_the_entry(pairs: Dataset, tmp_path: Path) -> None:
    def entries() -> int:
        return len(list(tmp_path.iterdir()))

    text = ("first", "second")
    tokenize(pairs, make_tokenizer(), text, max_length=9, cache_dir=tmp_path)
    other_labels = Dataset.from_dict({**PAIRS, "labels": [0, 0, 1, -1]})
    other_text = Dataset.from_dict({**PAIRS, "first": [*PAIRS["first"][:3], "us"]})
    other_vocabulary = make_tokenizer()
    other_vocabulary.add_tokens(["mouse"])
    for count, run in enumerate(
        [
            lambda: tokenize(pairs, make_tokenizer(), text, max_length=10, cache_dir=tmp_path),
            lambda: tokenize(pairs, make_tokenizer(), ("second", "first"), max_length=9, cache_dir=tmp_path),
            lambda: tokenize(pairs, make_tokenizer(types=False), text, max_length=9, cache_dir=tmp_path),
            lambda: tokenize(pairs, make_tokenizer(side="left"), text, max_length=9, cache_dir=tmp_path),
            lambda: tokenize(pairs, other_vocabulary, text, max_length=9, cache_dir=tmp_path),
            lambda: tokenize(other_labels, make_tokenizer(), text, max_length=9, cache_dir=tmp_path),
            lambda: tokenize(other_text, make_tokenizer(), text, max_length=9, cache_dir=tmp_path),
        ],
        start=2,
    ):
        assert not run().reused
        assert entries() == count


def test_the_content_hash_sees_cells_and_not_chunks() -> None:
    whole = Dataset.from_dict({"a": ["x", "yz", ""]})
    turned = Dataset.from_dict({"a": ["", "yz", "x", "w"]}).select([2, 1, 0])
    assert content_hash(whole, ("a",)) == content_hash(turned, ("a",))
    assert content_hash(whole, ("a",)) != content_hash(Dataset.from_dict({"a": ["xy", "z", ""]}), ("a",))


def test_the_callers_tokenizer_is_not_changed(pairs: Dataset, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    tokenize(pairs, tokenizer, ("first",), max_length=4, cache_dir=tmp_path)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_stored_truncation_and_padding_of_a_tokenizer_file_do_not_leak_in(tmp_path: Path, pairs: Dataset) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(length=32)
    tokenizer.backend_tokenizer.enable_truncation(4)
    got = tokenize(pairs, tokenizer, ("first",), max_length=64, cache_dir=tmp_path)
    assert got.dataset["length"][:] == [8, 16, 4, 2]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_processes_give_the_same_rows_and_leave_the_environment_alone(
    tmp_path: Path, num_proc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    data = Dataset.from_dict({"a": [" ".join(WORDS[: i % 17]) for i in range(2500)], "labels": list(range(2500))})
    plain = tokenize(data, make_tokenizer(), ("a",), max_length=9, cache_dir=tmp_path / "plain")
    split = tokenize(data, make_tokenizer(), ("a",), max_length=9, cache_dir=tmp_path / "split", num_proc=num_proc)
    assert split.dataset["input_ids"][:] == plain.dataset["input_ids"][:]
    assert split.truncated == plain.truncated
    assert split.rows.labels is not None
    assert split.rows.labels.tolist() == list(range(2500))
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize("processes", [None, 2])
def test_the_ids_that_occur_are_counted_once_and_stored(pairs: Dataset, tmp_path: Path, processes: int | None) -> None:
    for reused in (False, True):
        got = tokenize(
            pairs, make_tokenizer(), ("first", "second"), max_length=9, num_proc=processes, cache_dir=tmp_path
        )
        assert got.reused is reused
        assert got.rows.known_ids is not None
        plain = replace(got.rows, known_ids=None)
        assert got.rows.used_ids(99).tolist() == plain.used_ids(99).tolist()


def test_progress_ends_at_all_rows(tmp_path: Path) -> None:
    data = Dataset.from_dict({"a": ["the cat"] * 2500})
    seen: list[tuple[int, int]] = []
    tokenize(
        data, make_tokenizer(), ("a",), max_length=9, cache_dir=tmp_path, on_progress=lambda *done: seen.append(done)
    )
    assert seen == [(1000, 2500), (2000, 2500), (2500, 2500), (2500, 2500)]


def test_long_documents_go_in_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 100)
    sizes: list[int] = []
    real = tokenizing.call_within

    def spy(seconds: float, work: Any) -> Any:
        sizes.append(sum(map(len, work.args[0])))
        return real(seconds, work)

    monkeypatch.setattr(tokenizing, "call_within", spy)
    data = Dataset.from_dict({"a": ["cat " * 10] * 7 + ["dog " * 50] + ["mat"]})
    got = tokenize(data, make_tokenizer(), ("a",), max_length=100, cache_dir=tmp_path)
    assert got.dataset["length"][:] == [12] * 7 + [52, 3]
    assert sizes == [80, 80, 80, 40, 200, 3]


def test_a_damaged_entry_is_made_again(pairs: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = tokenize(pairs, make_tokenizer(), ("first",), max_length=9, cache_dir=tmp_path)
    [entry] = tmp_path.iterdir()
    for damage in ("cut", "gone", "manifest", "bit", "other entry"):
        if damage == "cut":
            path = entry / "rows.arrow"
            path.write_bytes(path.read_bytes()[:-30])
        elif damage == "gone":
            (entry / "rows.arrow").unlink()
        elif damage == "bit":
            path = entry / "rows.arrow"
            data, at = bytearray(path.read_bytes()), os.stat(path)
            data[data.index(int(first.rows.lengths[0]).to_bytes(4, "little"))] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
        elif damage == "other entry":
            tokenize(pairs, make_tokenizer(), ("second",), max_length=9, cache_dir=tmp_path)
            [other] = [path for path in tmp_path.iterdir() if path != entry]
            shutil.rmtree(entry)
            other.rename(entry)
        else:
            (entry / MANIFEST).write_text("{")
        again = tokenize(pairs, make_tokenizer(), ("first",), max_length=9, cache_dir=tmp_path)
        assert not again.reused
        assert again.dataset["input_ids"][:] == first.dataset["input_ids"][:]
        assert "cannot be used" in caplog.text
        caplog.clear()


def test_a_failed_build_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    bad = Dataset.from_dict({"a": ["the cat"] * 1500 + [None] + ["it"] * 10})
    with pytest.raises(DataError, match="row 1501, column a: None is not text"):
        tokenize(bad, make_tokenizer(), ("a",), max_length=9, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
sys.path[:0] = {tests!r}
from test_tokenize import make_tokenizer
from datasets import Dataset
from tunesmith.data.tokenize import tokenize
data = Dataset.from_dict({{"a": ["the cat"] * 5000}})
def kill(done, total):
    if done >= 3000:
        os.kill(os.getpid(), signal.SIGKILL)
tokenize(data, make_tokenizer(), ("a",), max_length=9, cache_dir={cache!r}, on_progress=kill)
"""


@pytest.mark.slow
def test_a_kill_half_way_leaves_no_entry_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    script = KILLED.format(tests=[str(Path(__file__).parent), str(Path(__file__).parents[2])], cache=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [p.name.startswith(".building-") for p in tmp_path.iterdir()] == [True]
    data = Dataset.from_dict({"a": ["the cat"] * 5000})
    got = tokenize(data, make_tokenizer(), ("a",), max_length=9, cache_dir=tmp_path)
    assert not got.reused
    assert len(got.rows) == 5000
    assert [p.name.startswith(".building-") for p in tmp_path.iterdir()] == [False]


def test_the_entry_of_a_faster_process_is_used(pairs: Dataset, tmp_path: Path) -> None:
    other = RowCache(tmp_path / "other")

    def batches() -> Iterator[Any]:
        yield from pairs.data.table.to_batches()

    def write_slowly() -> Iterator[Any]:
        yield from batches()
        other.build("k", batches(), lambda: {"who": "faster"})
        (tmp_path / "other" / "k").rename(tmp_path / "ours" / "k")

    built = RowCache(tmp_path / "ours").build("k", write_slowly(), lambda: {"who": "slower"})
    assert built is not None
    assert built.facts["who"] == "faster"
    assert [p.name for p in (tmp_path / "ours").iterdir()] == ["k"]


def test_a_folder_that_cannot_be_written_is_a_resource_error(pairs: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="the cache of rows cannot be written"):
        tokenize(pairs, make_tokenizer(), ("first",), max_length=9, cache_dir=tmp_path / "file")


def test_an_id_beyond_the_models_vocabulary_is_refused_also_from_the_cache(pairs: Dataset, tmp_path: Path) -> None:
    tokenize(pairs, make_tokenizer(), ("first",), max_length=32, cache_dir=tmp_path, vocab_size=len(WORDS) + 4)
    with pytest.raises(DataError, match="token id 22, but the model has only 20 token embeddings"):
        tokenize(pairs, make_tokenizer(), ("first",), max_length=32, cache_dir=tmp_path, vocab_size=20)


def test_a_padding_id_beyond_the_models_vocabulary_is_refused(pairs: Dataset, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    with pytest.raises(DataError, match="token id 23, but the model has only 23 token embeddings"):
        tokenize(pairs, tokenizer, ("first",), max_length=32, cache_dir=tmp_path, vocab_size=len(WORDS) + 4)


@pytest.mark.parametrize(("text", "least"), [(("first",), 3), (("first", "second"), 5)])
def test_a_length_without_room_for_text_is_refused(
    pairs: Dataset, tmp_path: Path, text: tuple[str, ...], least: int
) -> None:
    tokenize(pairs, make_tokenizer(), text, max_length=least, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"leaves no room for text\. Use {least} or more"):
        tokenize(pairs, make_tokenizer(), text, max_length=least - 1, cache_dir=tmp_path)


def test_no_rows_and_wrong_columns_are_data_errors(pairs: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        tokenize(pairs.select([]), make_tokenizer(), ("first",), max_length=9, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"cannot tokenize the columns frist\. Name one or two of: first, second"):
        tokenize(pairs, make_tokenizer(), ("frist",), max_length=9, cache_dir=tmp_path)


def test_the_longest_row_allowed_guards_the_unknown_marker() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.model_max_length > 1e29
    assert longest_allowed(tokenizer) == 512
    assert longest_allowed(tokenizer, model_max=128) == 128
    assert longest_allowed(tokenizer, model_max=128, asked=64) == 64
    assert longest_allowed(tokenizer, model_max=128, asked=256) == 128
    tokenizer.model_max_length = 100
    assert longest_allowed(tokenizer, model_max=128) == 100
    tokenizer.model_max_length = 8192
    assert longest_allowed(tokenizer, model_max=8192) == 512
    assert longest_allowed(tokenizer, model_max=8192, asked=4096) == 4096


def test_length_above_the_limit_of_the_model_is_reported() -> None:
    assert describe_lowered_length(None, 512) is None
    assert describe_lowered_length(128, 128) is None
    assert describe_lowered_length(5000, 512) == (
        "Warning: --max_seq_length 5000 was lowered to 512, the longest input that the model supports."
    )


def test_a_regular_expression_bomb_ends_in_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    data = Dataset.from_dict({"a": ["a" * 40 + "b"]})
    began = time.monotonic()
    with pytest.raises(DataError, match="the tokenizer failed"):
        tokenize(data, tokenizer, ("a",), max_length=9, cache_dir=tmp_path)
    assert time.monotonic() - began < patient(30)
    capfd.readouterr()


def test_a_call_that_does_not_end_is_given_up() -> None:
    with pytest.raises(DataError, match="did not finish a batch within 0 s"):
        call_within(0.05, lambda: time.sleep(1))


class WordsInPython:
    """A stand-in for a tokenizer without a Rust core."""

    is_fast = False
    truncation_side = "right"
    model_input_names = ("input_ids", "attention_mask")
    init_kwargs: ClassVar[dict[str, Any]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {"x": 0}

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return 1 + pair

    def __call__(self, *texts: list[str], truncation: bool, max_length: int = 0, **_: Any) -> dict[str, Any]:
        rows = [[len(w) for w in " ".join(cells).split()] for cells in zip(*texts, strict=True)]
        rows = [r[:max_length] if truncation else r for r in rows]
        return {"input_ids": rows, "token_type_ids": [[0] * len(r) for r in rows]}


def test_a_tokenizer_written_in_python_works(pairs: Dataset, tmp_path: Path) -> None:
    got = tokenize(pairs, WordsInPython(), ("first", "second"), max_length=6, cache_dir=tmp_path)
    assert got.dataset["input_ids"][:][0] == [3, 3, 3, 2, 3, 3]
    assert got.truncated.tokens_cut == 3 + 12 + 8


def shared_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(str(SHARED / "models" / name), local_files_only=True)


def shared_rows(name: str, split: str, cache: Path) -> Dataset:
    file = str(SHARED / "data" / name / f"{split}.parquet")
    return load_dataset("parquet", data_files=file, split="train", cache_dir=str(cache))


@needs_shared
def test_mrpc_with_the_uncased_vocabulary(tmp_path: Path) -> None:
    tokenizer = shared_tokenizer("paraphrase-MiniLM-L3-v2")
    one = Dataset.from_dict({"a": ["This is the first sentence."], "b": ["This is the second one."]})
    pair = tokenize(one, tokenizer, ("a", "b"), max_length=512, cache_dir=tmp_path).dataset[0]
    assert pair["input_ids"] == [101, 2023, 2003, 1996, 2034, 6251, 1012, 102, 2023, 2003, 1996, 2117, 2028, 1012, 102]
    assert pair["token_type_ids"] == [0] * 8 + [1] * 7
    for split, rows, max_length in (("train", 3668, 512), ("validation", 408, 512), ("test", 1725, 40)):
        data = shared_rows("mrpc", split, tmp_path)
        text = ("sentence1", "sentence2")
        got = tokenize(data, tokenizer, text, max_length=max_length, cache_dir=tmp_path / "tokens")
        assert len(got.rows) == rows
        want = tokenizer(*[data[name][:] for name in text], truncation=True, max_length=max_length)
        assert got.dataset["input_ids"][:] == want["input_ids"]
        assert got.dataset["token_type_ids"][:] == want["token_type_ids"]
        assert (got.truncated.rows_cut > 0) == (max_length == 40)
        if split == "train":
            assert got.rows.lengths[:8].tolist() == [50, 59, 47, 67, 59, 50, 62, 32]


@needs_shared
def test_the_cased_vocabulary_keeps_case(tmp_path: Path) -> None:
    tokenizer = shared_tokenizer("bert-base-cased-vocab")
    data = Dataset.from_dict({"a": ["Paris", "paris"]})
    first, second = tokenize(data, tokenizer, ("a",), max_length=512, cache_dir=tmp_path).dataset["input_ids"][:]
    assert tokenizer.convert_ids_to_tokens(first) == ["[CLS]", "Paris", "[SEP]"]
    assert first != second


@needs_shared
def test_roberta_and_trec(tmp_path: Path) -> None:
    tokenizer = shared_tokenizer("granite-embedding-30m-english")
    data = shared_rows("trec", "train", tmp_path)
    got = tokenize(data, tokenizer, ("text",), max_length=16, cache_dir=tmp_path / "tokens")
    assert len(got.rows) == 5452
    assert "token_type_ids" not in got.dataset.column_names
    assert got.dataset["input_ids"][:] == tokenizer(data["text"][:], truncation=True, max_length=16)["input_ids"]
    assert got.truncated.rows_cut > 0


def test_killed_worker_process_is_an_error_and_leaves_no_cache_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset.from_dict({"a": ["one two"] * 3000})
    with monkeypatch.context() as patched:
        patched.setattr(tokenizing, "_WORKER", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        with pytest.raises(WorkerError, match="a worker process died") as caught:
            tokenize(data, make_tokenizer(), ("a",), max_length=9, cache_dir=tmp_path, num_proc=2)
    assert caught.value.exit_code == 7
    assert list(tmp_path.iterdir()) == []
    again = tokenize(data, make_tokenizer(), ("a",), max_length=9, cache_dir=tmp_path, num_proc=2)
    assert len(again.rows) == 3000
