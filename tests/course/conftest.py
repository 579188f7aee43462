"""MRPC and a small encoder from ../shared, with a tokenizer whose vocabulary is BERT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def checkpoint(shared: Path) -> str:
    """Return a small BERT-like encoder with the vocabulary of bert-base-uncased."""
    return str(shared / "models" / "paraphrase-MiniLM-L3-v2")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="session")
def raw_datasets(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return MRPC in the format of `load_dataset("glue", "mrpc")`."""
    from datasets import load_dataset

    files = {split: str(shared / "data" / "mrpc" / f"{split}.parquet") for split in ("train", "validation", "test")}
    return load_dataset("parquet", data_files=files, cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def tokenized_datasets(raw_datasets: Any, tokenizer: Any) -> Any:
    """Return every split with three more columns (row 7 of the course)."""

    def tokenize_function(example: Any) -> Any:
        return tokenizer(example["sentence1"], example["sentence2"], truncation=True)

    return raw_datasets.map(tokenize_function, batched=True)
