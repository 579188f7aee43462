"""A small replacement for the bundled model: its tokenizer and two layers of width 32, so that documentation tests are fast.

`docs/quickstart.md`, the wheel's demo and the notebook (`make long`) run with the bundled model itself.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SPREAD = 0.2
"""Standard deviation of the weights: with BERT's 0.02, a model of this width predicts the same label for every text."""


@functools.cache
def small_embedded() -> Path:
    """Make the small model once per process; return a folder that replaces the package's folder."""
    from tunesmith.models.files import find_embedded

    folder = Path(tempfile.mkdtemp(prefix="small-embedded-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shrink(find_embedded(), folder / "model")
    return folder


def shrink(source: Path, folder: Path) -> Path:
    """Write a small random model with the tokenizer of a BERT folder."""
    import torch
    from transformers import AutoConfig, BertModel

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "config.json"))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(source, **CONFIG, initializer_range=SPREAD)
        BertModel(config).save_pretrained(folder)
    return folder


def replace_embedded(folder: Path) -> dict[str, Any]:
    """Use the model in `folder` as the bundled model of this process; return the previous settings."""
    from tunesmith.files import known_hash
    from tunesmith.models import files

    before = {name: getattr(files, name) for name in ("find_spec", "EMBEDDED_SHA256")}
    files.find_spec = lambda name: SimpleNamespace(submodule_search_locations=[str(folder)])  # type: ignore[assignment]
    files.EMBEDDED_SHA256 = known_hash(folder / "model" / "model.safetensors")
    return before


@contextmanager
def embedded_replaced(folder: Path) -> Iterator[None]:
    """Context manager for `replace_embedded`."""
    from tunesmith.models import files

    before = replace_embedded(folder)
    try:
        yield
    finally:
        vars(files).update(before)
