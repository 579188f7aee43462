"""What is printed about data, tokens and model before the first step."""

from __future__ import annotations

import os
from pathlib import Path

from tunesmith.config.schema import RunConfig
from tunesmith.encoder.load import LoadedModel
from tunesmith.encoder.resolve import EMBEDDED
from tunesmith.fast.in_force import Strategies
from tunesmith.predict.tables import describe_renaming, names_of_run
from tunesmith.ranks.runtime import Runtime, has_triton
from tunesmith.session.inputs import RunData
from tunesmith.session.watch import Say
from tunesmith.tokens.tokenize import Tokenized
from tunesmith.tokens.truncation import describe_empty


def say_data(say: Say, data: RunData) -> None:
    """The notes of the reader, the rows of each split, and what was found wrong."""
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in data.bundle.splits.items())
    ours = names_of_run(data.bundle.columns.text, data.bundle.labels)
    for note in (*data.bundle.notes, *data.notes, describe_renaming(ours, ours.values()), f"Rows: {sizes}."):
        if note is not None:
            say(note)
    for finding in data.bundle.findings:
        if finding.severity != "info":
            say(finding.line())


def say_lengths(say: Say, tokenized: dict[str, Tokenized], length: int) -> None:
    """What was cut, a line for each split; one line for all when nothing was."""
    cut = {split: t.truncated for split, t in tokenized.items() if t.truncated.rows_cut}
    for split, count in cut.items():
        say(f"Cut: {count.sentence(split)}.")
    if not cut:
        say(f"Tokens: no row is longer than {length}, so nothing is cut.")
    for split, part in tokenized.items():
        if part.empty:
            say(describe_empty(split, part.empty))


def say_model(
    say: Say, config: RunConfig, loaded: LoadedModel, strategies: Strategies, runtime: Runtime, plain: str | None = None
) -> None:
    """The model, what it computes in (`plain` is why in float32), and which speed-ups are on."""
    count = loaded.parameters
    size = f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"
    name = config.model_name_or_path or EMBEDDED
    say(f"Model: {name}, {size} parameters, on {runtime.device}.")
    if runtime.precision == "bf16" and config.bf16 is None:
        say("Precision: bf16, as this GPU has it (weights stay float32); --no_bf16 computes in float32.")
    if plain is not None:
        say(
            f"Precision: float32, quicker than bf16 for steps launched one kernel at a time ({plain}); --bf16 for bf16."
        )
    asked = config.train_sampling_strategy or config.token_budget
    if asked is None and strategies.best_order(runtime.device) == "random":
        say("Order: random, as batches have no padding here; --train_sampling_strategy names another.")
    if runtime.sharding is not None:
        say(f"FSDP: weights, gradients and optimizer state are sharded over {runtime.world} ranks.")
    for note in (*loaded.notes, *strategies.notes):
        say(f"{note[0].upper()}{note[1:]}.")
    if runtime.device.type == "cuda" and has_triton() and is_empty(kernel_cache()):
        say(
            f"Kernels: compiled for this GPU now and kept in {kernel_cache()}: the first start takes longer, others do not."
        )
    if strategies.on:
        say(f"Exact speed-ups: {', '.join(strategies.on)}.")


def kernel_cache() -> Path:
    """Where triton keeps compiled kernels for all runs of a user."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton"
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / "cache")


def is_empty(folder: Path) -> bool:
    """Whether there is no such folder, or nothing in it."""
    return not folder.is_dir() or not any(folder.iterdir())
