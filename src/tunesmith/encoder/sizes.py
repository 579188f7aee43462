"""How large the model of a config is, counted on the meta device: before a byte of it is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from tunesmith.encoder.config_file import name_field
from tunesmith.encoder.guard import naming
from tunesmith.encoder.tensor_header import count_parameters
from tunesmith.errors import ConfigError, ResourceError

LARGEST_MODEL = 20_000_000_000
"""Parameters; a config that asks for more is refused."""
MOST_NEW = 16_000_000
"""Parameters that may be new beside twice those in the folder: a head of 10,000 labels over 1,024 dimensions has 11 million."""


def require_fitting(config: Any, stored: dict[str, Any], folder: Path) -> None:
    """Refuses a model that is far larger than the weights in its folder, or than the memory of this machine."""
    import torch
    from transformers import AutoModelForSequenceClassification

    make: Any = AutoModelForSequenceClassification.from_config
    described = naming("its config.json describes no model", folder)
    with described, without_first_values(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = make(deepcopy(config))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    total = sum(tensor.numel() for tensor in tensors.values())
    there = count_parameters(folder)
    if total > min(LARGEST_MODEL, 2 * there + MOST_NEW):
        name, largest = max(tensors.items(), key=lambda item: item[1].numel())
        field = name_field(stored, max(largest.shape, default=0))
        raise ConfigError(
            f"describes a model of {total:,} parameters, {largest.numel():,} of them in {name}{field}; "
            f"the weights there have {there:,}",
            where=str(folder / "config.json"),
        )
    free = _free_memory()
    if free is not None and 4 * total > free:
        raise ResourceError(
            f"the model takes {4 * total / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free", where=str(folder)
        )


@contextmanager
def without_first_values() -> Iterator[None]:
    """No random numbers for weights on the meta device: they have none, and drawing them loads the compiler of torch."""
    import torch

    kinds: list[Any] = [torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm]
    drawing = [kind.reset_parameters for kind in kinds]

    def unless_meta(draw: Any) -> Any:
        return lambda module: None if module.weight is not None and module.weight.is_meta else draw(module)

    for kind, draw in zip(kinds, drawing, strict=True):
        kind.reset_parameters = unless_meta(draw)
    try:
        yield
    finally:
        for kind, draw in zip(kinds, drawing, strict=True):
            kind.reset_parameters = draw


def _free_memory() -> int | None:
    """Bytes that can be had without pushing others out, with swap; None where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    free = found.get("MemAvailable")
    return None if free is None else free + found.get("SwapFree", 0)
