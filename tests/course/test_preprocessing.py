"""Rows 1 to 9 of the course: one batch, the dataset, tokens, map, padding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

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
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[2] < losses[0]


def test_row_2_mrpc_has_its_splits_columns_and_names(raw_datasets: Any) -> None:
    assert {name: len(rows) for name, rows in raw_datasets.items()} == {"train": 3668, "validation": 408, "test": 1725}
    assert raw_datasets["train"].column_names == ["sentence1", "sentence2", "label", "idx"]
    assert raw_datasets["train"].features["label"].names == ["not_equivalent", "equivalent"]


def test_row_3_rows_are_dicts_and_data_stays_on_disk(raw_datasets: Any) -> None:
    first = raw_datasets["train"][0]
    assert first["sentence1"].startswith("Amrozi accused his brother")
    assert first["label"] == 1
    assert raw_datasets["train"]["label"][:3] == [1, 0, 1]
    assert all(Path(f["filename"]).is_file() for f in raw_datasets["train"].cache_files)
    assert raw_datasets["train"].cache_files


def test_row_4_tokenizer_accepts_sentence_list_pair_and_columns(
    tokenizer: Any, raw_datasets: Any, shared: Path
) -> None:
    assert set(tokenizer("One sentence.")) == {"input_ids", "token_type_ids", "attention_mask"}
    assert len(tokenizer(["One.", "Two."])["input_ids"]) == 2
    pair = tokenizer("This is the first sentence.", "This is the second one.")
    assert pair["input_ids"] == PAIR
    assert pair["token_type_ids"] == [0] * 8 + [1] * 7
    some = raw_datasets["train"].select(range(5))
    both = tokenizer(list(some["sentence1"]), list(some["sentence2"]))
    assert all(set(ids) == {0, 1} for ids in both["token_type_ids"])


def test_row_4_distilbert_has_no_segments(shared: Path) -> None:
    from transformers import DistilBertTokenizer

    vocabulary = shared / "models" / "paraphrase-MiniLM-L3-v2" / "vocab.txt"
    tokenizer = DistilBertTokenizer(vocab=str(vocabulary))
    assert "token_type_ids" not in tokenizer("This is the first sentence.", "This is the second one.")


def test_row_5_ids_convert_back_to_tokens(tokenizer: Any) -> None:
    words = "[CLS] this is the first sentence . [SEP] this is the second one . [SEP]"
    assert " ".join(tokenizer.convert_ids_to_tokens(PAIR)) == words
    padded = tokenizer(["Short.", "A much longer sentence."], padding=True)["input_ids"][0]
    assert tokenizer.convert_ids_to_tokens(padded)[-1] == "[PAD]"


def test_row_6_short_sentence_is_padded_with_zeros(tokenizer: Any) -> None:
    batch = tokenizer(["Short sentence.", "This one is a longer sentence."], padding=True)
    assert batch["input_ids"][0] == SHORT + [0] * 4
    assert batch["attention_mask"][0] == [1] * 5 + [0] * 4


def test_row_6_tunesmith_padding_matches_tokenizer(tokenizer: Any) -> None:
    import numpy as np

    texts = ["Short sentence.", "This one is a longer sentence."]
    theirs = tokenizer(texts, padding=True, return_tensors="pt")
    plain = tokenizer(texts)
    rows = TokenRows.from_lists({k: plain[k] for k in ("input_ids", "token_type_ids")})
    ours = make_batch(rows, np.arange(2), Padding())
    for name in theirs:
        assert torch.equal(ours.inputs[name], theirs[name]), name


def test_row_7_map_adds_three_columns_to_every_split(tokenized_datasets: Any) -> None:
    for split in ("train", "validation", "test"):
        assert set(tokenized_datasets[split].column_names) >= {"input_ids", "token_type_ids", "attention_mask"}


def test_row_7_batched_map_equals_single_map(raw_datasets: Any, tokenizer: Any) -> None:
    some = raw_datasets["train"].select(range(1000)).flatten_indices()
    calls = Counter[bool]()
    found = {}
    for batched in (False, True):

        def tokenize(rows: Any, batched: bool = batched) -> Any:
            calls[batched] += 1
            return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True)

        found[batched] = some.map(tokenize, batched=batched, load_from_cache_file=False)["input_ids"][:]
    # batched is much faster: the tokenizer's threads get a thousand examples per call
    assert calls[False] >= 1000
    assert calls[True] <= 2
    assert found[True] == found[False]
    split = some.map(
        lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True, num_proc=2
    )
    assert split["input_ids"][:] == found[True]


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
