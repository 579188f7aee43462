"""Rows 1 to 9 of the course: one batch, the dataset, tokens, map, padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tunesmith import DataCollatorWithPadding
from tunesmith.data.batches import Padding, TokenRows, make_batch

PAIR = [101, 2023, 2003, 1996, 2034, 6251, 1012, 102, 2023, 2003, 1996, 2117, 2028, 1012, 102]
SHORT = [101, 2460, 6251, 1012, 102]
LONG = "This is a longer sentence."


@pytest.mark.slow
def test_row_1_loss_on_one_batch_falls(checkpoint: str, tokenizer: Any) -> None:
    from transformers import AutoModelForSequenceClassification, set_seed

    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    sequences = ["I've been waiting for a course like this my whole life.", "This course is amazing!"]
    batch = tokenizer(sequences, padding=True, truncation=True, return_tensors="pt")
    batch["labels"] = torch.tensor([1, 1])
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0] < float("inf")


def test_row_2_mrpc_has_its_splits_columns_and_names(raw_datasets: Any) -> None:
    assert {name: len(rows) for name, rows in raw_datasets.items()} == {"train": 3668, "validation": 408, "test": 1725}
    assert raw_datasets["train"].column_names == ["sentence1", "sentence2", "label", "idx"]
    assert raw_datasets["train"].features["label"].names == ["not_equivalent", "equivalent"]


def test_row_3_rows_are_dicts_and_data_stays_on_disk(raw_datasets: Any) -> None:
    first = raw_datasets["train"][0]
    assert first["sentence1"].startswith("Amrozi accused his brother")
    assert first["label"] == 1
    assert raw_datasets["train"]["label"][:3] == [1, 0, 1]
    assert raw_datasets["train"].cache_files


def test_row_4_tokenizer_accepts_sentence_list_pair_and_columns(
    tokenizer: Any, raw_datasets: Any, shared: Path
) -> None:
    from transformers import DistilBertTokenizer

    assert set(tokenizer("One sentence.")) == {"input_ids", "token_type_ids", "attention_mask"}
    assert len(tokenizer(["One.", "Two."])["input_ids"]) == 2
    pair = tokenizer("This is the first sentence.", "This is the second one.")
    assert pair["input_ids"] == PAIR
    assert pair["token_type_ids"] == [0] * 8 + [1] * 7
    some = raw_datasets["train"].select(range(5))
    both = tokenizer(list(some["sentence1"]), list(some["sentence2"]))
    assert all(set(ids) == {0, 1} for ids in both["token_type_ids"])
    distilbert = DistilBertTokenizer(vocab=str(shared / "models" / "paraphrase-MiniLM-L3-v2" / "vocab.txt"))
    assert "token_type_ids" not in distilbert("This is the first sentence.", "This is the second one.")


def test_row_5_ids_convert_back_to_tokens(tokenizer: Any) -> None:
    words = "[CLS] this is the first sentence . [SEP] this is the second one . [SEP]"
    assert " ".join(tokenizer.convert_ids_to_tokens(PAIR)) == words
    padded = tokenizer(["Short.", "A much longer sentence."], padding=True)["input_ids"][0]
    assert tokenizer.convert_ids_to_tokens(padded)[-1] == "[PAD]"


def test_row_6_short_sentence_is_padded_with_zeros(tokenizer: Any) -> None:
    texts = ["Short sentence.", "This one is a longer sentence."]
    theirs, plain = tokenizer(texts, padding=True, return_tensors="pt"), tokenizer(texts)
    assert theirs["input_ids"][0].tolist() == SHORT + [0] * 4
    assert theirs["attention_mask"][0].tolist() == [1] * 5 + [0] * 4
    rows = TokenRows.from_lists({k: plain[k] for k in ("input_ids", "token_type_ids")})
    ours = make_batch(rows, np.arange(2), Padding())
    assert all(torch.equal(ours.inputs[name], theirs[name]) for name in theirs)


def test_row_7_map_adds_three_columns_to_every_split(
    raw_datasets: Any, tokenized_datasets: Any, tokenizer: Any
) -> None:
    for split in ("train", "validation", "test"):
        assert set(tokenized_datasets[split].column_names) >= {"input_ids", "token_type_ids", "attention_mask"}

    def tokenize(rows: Any) -> Any:
        return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True)

    some = raw_datasets["train"].select(range(200)).flatten_indices()
    expected = tokenized_datasets["train"][:200]["input_ids"]
    for options in ({}, {"batched": True}, {"batched": True, "num_proc": 2}):
        assert some.map(tokenize, load_from_cache_file=False, **options)["input_ids"][:] == expected, options


def test_row_8_first_eight_rows_collate_to_67_columns(tokenized_datasets: Any, tokenizer: Any) -> None:
    samples = tokenized_datasets["train"][:8]
    samples = {k: v for k, v in samples.items() if k not in ("idx", "sentence1", "sentence2")}
    assert [len(x) for x in samples["input_ids"]] == [50, 59, 47, 67, 59, 50, 62, 32]
    batch = DataCollatorWithPadding(tokenizer=tokenizer)(samples)
    assert {k: tuple(v.shape) for k, v in batch.items()} == {
        "input_ids": (8, 67),
        "token_type_ids": (8, 67),
        "attention_mask": (8, 67),
        "labels": (8,),
    }


def test_row_9_every_batch_can_be_128_wide(tokenized_datasets: Any, tokenizer: Any) -> None:
    from torch.utils.data import DataLoader

    rows = tokenized_datasets["train"].select(range(40)).remove_columns(["sentence1", "sentence2", "idx"])
    collate = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=128)
    widths = {batch["input_ids"].shape[1] for batch in DataLoader(rows, batch_size=8, collate_fn=collate)}
    assert widths == {128}
