"""Rows are tokenized and truncated as by transformers, and cached."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from datasets import Dataset, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tunesmith.data.tokenize import (
    LEAST_CHARS,
    RustEncoder,
    Tokenized,
    longest_allowed,
    make_token_encoder,
    tokenize,
)
from tunesmith.errors import ConfigError, DataError

SHARED = Path(__file__).parents[4] / "shared"


needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is missing")


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


def ids_of(found: Tokenized, name: str = "input_ids") -> list[list[int]]:
    return [row.tolist() for row in found.rows.columns[name].take(np.arange(len(found.rows)))]


@pytest.fixture
def pairs() -> Dataset:
    return Dataset.from_dict(PAIRS)


@pytest.mark.parametrize("max_length", [5, 13, 64])
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
    assert ids_of(got) == want["input_ids"]
    assert ids_of(got, "token_type_ids") == want["token_type_ids"]
    assert got.rows.lengths.tolist() == [len(r) for r in want["input_ids"]]
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
def test_any_pair_is_truncated_like_the_tokenizer(rows: list[tuple[str, str]], max_length: int, side: str) -> None:
    tokenizer = make_tokenizer(side=side)
    encoder = RustEncoder(tokenizer, max_length)
    first, second = [list(column) for column in zip(*rows, strict=True)]
    for texts in ([first], [first, second]):
        want = tokenizer(*texts, truncation=True, max_length=max_length)
        got = encoder.encode(texts)
        assert [r.ids for r in got] == want["input_ids"]
        assert [r.types for r in got] == want["token_type_ids"]


def test_second_run_does_not_call_the_tokenizer(
    pairs: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenize(pairs, make_tokenizer(), ("first", "second"), max_length=9, cache_dir=tmp_path)
    called: list[bool] = []
    monkeypatch.setattr(RustEncoder, "encode", lambda *_: called.append(True))
    moved = Dataset.from_dict({**PAIRS, "labels": [0, 0, 0, 0]})  # equal texts, different object
    again = tokenize(moved, make_tokenizer(), ("first", "second"), max_length=9, cache_dir=tmp_path)
    assert not called
    assert again.truncated == first.truncated
    assert ids_of(again) == ids_of(first)
    assert again.rows.labels is not None
    assert not again.rows.labels.any()


def test_change_of_text_tokenizer_or_length_is_not_cached(pairs: Dataset, tmp_path: Path) -> None:
    text = ("first", "second")
    other_text = Dataset.from_dict({**PAIRS, "first": [*PAIRS["first"][:3], "us"]})
    other_vocabulary = make_tokenizer()
    other_vocabulary.add_tokens(["mouse"])
    for count, (data, tokenizer, names, length) in enumerate(
        [
            (pairs, make_tokenizer(), text, 9),
            (pairs, make_tokenizer(), text, 10),
            (pairs, make_tokenizer(), ("second", "first"), 9),
            (pairs, make_tokenizer(types=False), text, 9),
            (pairs, make_tokenizer(side="left"), text, 9),
            (pairs, other_vocabulary, text, 9),
            (other_text, make_tokenizer(), text, 9),
        ],
        start=1,
    ):
        tokenize(data, tokenizer, names, max_length=length, cache_dir=tmp_path)
        assert len(list(tmp_path.iterdir())) == count


def test_truncation_settings_of_tokenizer_file_are_ignored(tmp_path: Path, pairs: Dataset) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(length=32)
    tokenizer.backend_tokenizer.enable_truncation(4)
    before = tokenizer.backend_tokenizer.to_str()
    got = tokenize(pairs, tokenizer, ("first",), max_length=64, cache_dir=tmp_path)
    assert got.rows.lengths.tolist() == [8, 16, 4, 2]
    assert tokenizer.backend_tokenizer.to_str() == before


def test_damaged_cache_file_is_rebuilt(pairs: Dataset, tmp_path: Path) -> None:
    first = tokenize(pairs, make_tokenizer(), ("first",), max_length=9, cache_dir=tmp_path)
    [file] = tmp_path.iterdir()
    good = file.read_bytes()
    for damaged in (good[:-30], good[:-9] + bytes([good[-9] ^ 1]) + good[-8:], b""):
        file.write_bytes(damaged)
        assert ids_of(tokenize(pairs, make_tokenizer(), ("first",), max_length=9, cache_dir=tmp_path)) == ids_of(first)
        assert file.read_bytes() == good


def test_unwritable_cache_folder_is_only_a_note(pairs: Dataset, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    tokenize(pairs, make_tokenizer(), ("first",), max_length=9, cache_dir=tmp_path / "file")
    assert "the tokens are not cached" in caplog.text


def test_id_beyond_the_vocabulary_is_refused(pairs: Dataset, tmp_path: Path) -> None:
    tokenize(pairs, make_tokenizer(), ("first",), max_length=32, cache_dir=tmp_path, vocab_size=len(WORDS) + 4)
    with pytest.raises(DataError, match="token id 22, but the model has only 20 token embeddings"):
        tokenize(pairs, make_tokenizer(), ("first",), max_length=32, cache_dir=tmp_path, vocab_size=20)


@pytest.mark.parametrize(("text", "least"), [(("first",), 3), (("first", "second"), 5)])
def test_length_without_room_for_text_is_refused(
    pairs: Dataset, tmp_path: Path, text: tuple[str, ...], least: int
) -> None:
    tokenize(pairs, make_tokenizer(), text, max_length=least, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"leaves no room for text\. Use {least} or more"):
        tokenize(pairs, make_tokenizer(), text, max_length=least - 1, cache_dir=tmp_path)


def test_max_length_is_limited_by_tokenizer_and_model() -> None:
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


class WordsInPython:
    """A tokenizer without a Rust core."""

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


def test_tokenizer_written_in_python_works(pairs: Dataset, tmp_path: Path) -> None:
    got = tokenize(pairs, WordsInPython(), ("first", "second"), max_length=6, cache_dir=tmp_path)
    assert ids_of(got)[0] == [3, 3, 3, 2, 3, 3]
    assert got.truncated.tokens_cut == 3 + 12 + 8


def shared_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(str(SHARED / "models" / name), local_files_only=True)


def shared_rows(name: str, split: str, cache: Path) -> Dataset:
    file = str(SHARED / "data" / name / f"{split}.parquet")
    return load_dataset("parquet", data_files=file, split="train", cache_dir=str(cache))


@needs_shared
def test_trec_with_roberta_equals_transformers(tmp_path: Path) -> None:
    tokenizer = shared_tokenizer("granite-embedding-30m-english")
    data = shared_rows("trec", "train", tmp_path)
    got = tokenize(data, tokenizer, ("text",), max_length=16, cache_dir=tmp_path / "tokens")
    assert len(got.rows) == 5452
    assert "token_type_ids" not in got.rows.columns
    assert ids_of(got) == tokenizer(data["text"][:], truncation=True, max_length=16)["input_ids"]
    assert got.truncated.rows_cut > 0


PIECES = ("cat", "dog", "sat", "mat", "ran", "##s", "away", "x", "y", "z")


SPLITTERS: dict[str, Any] = {
    "bert": pre_tokenizers.BertPreTokenizer(),
    "whitespace": pre_tokenizers.WhitespaceSplit(),
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace": pre_tokenizers.Metaspace(),
}


def split_by(splitter: str, side: str = "right") -> Any:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *PIECES,
        *(f"\u0120{w}" for w in PIECES),
        *(f"\u2581{w}" for w in PIECES),
    ]
    core = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer() if splitter == "bert" else normalizers.NFKC()
    core.pre_tokenizer = SPLITTERS[splitter]
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, truncation_side=side, **special)


def long_text(seed: int, size: int = LEAST_CHARS + 8000) -> str:
    rng = random.Random(seed)
    words = [
        rng.choice([*PIECES, "cats", "caf\u00e9", "\u4e2d\u6587", "a-b", "dog,", "  ", "\n"]) for _ in range(size // 3)
    ]
    return " ".join(words)[:size]


@pytest.mark.parametrize(("splitter", "side"), [*((one, "right") for one in SPLITTERS), ("bert", "left")])
def test_long_text_split_for_speed_has_equal_tokens(splitter: str, side: str) -> None:
    tokenizer = split_by(splitter, side)
    texts, others = [long_text(1), "cat sat", long_text(2)], ["dog ran", long_text(3), "x"]
    for columns in ([texts], [texts, others]):
        rows = make_token_encoder(tokenizer, 32).encode(columns)
        whole = tokenizer(*columns, truncation=True, max_length=32)
        assert [row.ids for row in rows] == whole["input_ids"]
        assert [row.cut > 0 for row in rows] == ([True, False, True] if len(columns) == 1 else [True] * 3)


def test_skipped_end_of_a_text_counts_as_truncated(tmp_path: Path) -> None:
    data = Dataset.from_dict({"text": ["cat sat", " " * 2_000_000 + "cat", long_text(5)]})
    for _ in range(2):  # the second time from the cache
        got = tokenize(data, split_by("bert"), ["text"], max_length=16, cache_dir=tmp_path)
        assert "2 of 3 rows (66.7%) were truncated to 16 tokens, " in got.truncated.sentence("train")
        assert got.empty == (1,)


@pytest.mark.parametrize("second", [None, "y z", " ".join(["y"] * 30)])
def test_head_tail_keeps_both_ends_of_a_text(second: str | None) -> None:
    first = " ".join(["cat"] * 40 + ["sat"] * 20 + ["dog"] * 40)
    columns = [[first, "cat"]] if second is None else [[first, "cat"], [second, "x"]]
    tokenizer = split_by("bert")
    head = make_token_encoder(tokenizer, 17).encode(columns)
    both = make_token_encoder(tokenizer, 17, "head_tail").encode(columns)
    assert both[1] == head[1]  # a row that fits is unchanged
    assert [len(row.ids) for row in both] == [len(row.ids) for row in head]
    assert (both[0].cut, both[0].types) == (head[0].cut, head[0].types)
    kept = [word for word in tokenizer.convert_ids_to_tokens(both[0].ids) if word in ("cat", "sat", "dog")]
    assert "sat" not in kept
    assert abs(kept.count("cat") - kept.count("dog")) <= 1
    assert kept == sorted(kept)
