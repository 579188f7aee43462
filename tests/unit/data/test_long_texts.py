"""A text of megabytes is read as far as a row can hold it: the same tokens, counted as cut, in bounded memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tunesmith.data.tokenize import LEAST_CHARS, make_token_encoder, shorten, tokenize

WORDS = ("cat", "dog", "sat", "mat", "ran", "##s", "away", "x", "y", "z")
SPLITTERS: dict[str, Any] = {
    "bert": pre_tokenizers.BertPreTokenizer(),
    "whitespace": pre_tokenizers.WhitespaceSplit(),
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace": pre_tokenizers.Metaspace(),
}


def make_tokenizer(splitter: str, side: str = "right") -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *(f"\u0120{w}" for w in WORDS), *(f"\u2581{w}" for w in WORDS)]
    core = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer() if splitter == "bert" else normalizers.NFKC()
    core.pre_tokenizer = SPLITTERS[splitter]
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, truncation_side=side, **special)


def long_text(seed: int, size: int = 3 * LEAST_CHARS) -> str:
    rng = random.Random(seed)
    words = [
        rng.choice([*WORDS, "cats", "caf\u00e9", "\u4e2d\u6587", "a-b", "dog,", "  ", "\n"]) for _ in range(size // 3)
    ]
    return " ".join(words)[:size]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("splitter", SPLITTERS)
def test_the_tokens_of_a_long_text_are_those_of_the_whole(splitter: str, side: str) -> None:
    tokenizer = make_tokenizer(splitter, side)
    texts, others = [long_text(1), "cat sat", long_text(2)], ["dog ran", long_text(3), "x"]
    for columns in ([texts], [texts, others]):
        rows = make_token_encoder(tokenizer, 32).encode(columns)
        whole = tokenizer(*columns, truncation=True, max_length=32)
        assert [row.ids for row in rows] == whole["input_ids"]
        assert [row.unread for row in rows] == ([True, False, True] if len(columns) == 1 else [True] * 3)
        assert all(row.cut > 0 for row in rows if row.unread)


@pytest.mark.parametrize("part", ["x", " ", "\u4e2d", "x ", None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_no_more_than_a_bound_of_a_text_reaches_the_tokenizer(part: str | None, side: str) -> None:
    text = long_text(4, 400_000) * 10 if part is None else part * (4_000_000 // len(part))
    [[short]], unread = shorten([[text]], 64, side)
    assert LEAST_CHARS // 2 <= len(short) <= LEAST_CHARS
    assert text.startswith(short) if side == "right" else text.endswith(short)
    assert unread == {0}
    [[same]], none = shorten([[short]], 64, side)
    assert (same, none) == (short, set())


def test_a_text_that_was_not_read_to_its_end_counts_as_cut_in_every_way(tmp_path: Path) -> None:
    data = Dataset.from_dict({"text": ["cat sat", " " * 2_000_000 + "cat", long_text(5)]})
    for _ in range(2):  # the second time from the cache
        got = tokenize(data, make_tokenizer("bert"), ["text"], max_length=16, cache_dir=tmp_path)
        assert (got.truncated.rows_cut, got.truncated.unread) == (2, 2)
        assert "2 of 3 rows (66.7%) were truncated to 16 tokens, at least " in got.truncated.sentence("train")
        assert got.empty == (1,)


@pytest.mark.parametrize("second", [None, "y z", " ".join(["y"] * 30)])
def test_head_and_tail_are_the_two_ends_of_each_text_that_is_cut(second: str | None) -> None:
    first = " ".join(["cat"] * 40 + ["sat"] * 20 + ["dog"] * 40)
    columns = [[first, "cat"]] if second is None else [[first, "cat"], [second, "x"]]
    tokenizer = make_tokenizer("bert")
    head = make_token_encoder(tokenizer, 17).encode(columns)
    both = make_token_encoder(tokenizer, 17, "head_tail").encode(columns)
    assert both[1] == head[1]  # a row that fits is not touched
    assert [len(row.ids) for row in both] == [len(row.ids) for row in head]
    assert (both[0].cut, both[0].types) == (head[0].cut, head[0].types)
    kept = [word for word in tokenizer.convert_ids_to_tokens(both[0].ids) if word in ("cat", "sat", "dog")]
    assert "sat" not in kept
    assert abs(kept.count("cat") - kept.count("dog")) <= 1
    assert kept == sorted(kept)


def test_of_a_text_of_megabytes_both_ends_are_read() -> None:
    text = " ".join(["cat"] * 400_000 + ["dog"] * 400_000)
    [[short]], unread = shorten([[text]], 64, "both")
    assert unread == {0}
    assert len(short) <= LEAST_CHARS
    assert abs(short.count("cat") - short.count("dog")) < 10
    [row] = make_token_encoder(make_tokenizer("bert"), 12, "head_tail").encode([[text]])
    words = make_tokenizer("bert").convert_ids_to_tokens(row.ids)
    assert words == ["[CLS]", *["cat"] * 5, *["dog"] * 5, "[SEP]"]
    assert row.unread
