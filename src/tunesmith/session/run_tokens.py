"""The rows of a run as tokens, and what the model is shown of rows that are too long for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.config.schema import RunConfig
from tunesmith.encoder.tokenizer import position_limit
from tunesmith.reading.load import DataBundle
from tunesmith.recipes.deciding import Decision
from tunesmith.session.watch import ShowProgress
from tunesmith.tokens.tokenize import LONGEST_LENGTH, USUAL_LENGTH, Tokenized, longest_allowed, tokenize
from tunesmith.tokens.truncation import LongTexts

FEW_CUT = 0.02
"""Share of the training rows that may be cut before `auto` does anything about it."""
MOST_TOKENS = 2.0
"""How many times the tokens of the cut rows `auto` may give the model."""


@dataclass(frozen=True)
class RunTokens:
    """`config` has no open `long_texts`; `decision` is None when there was nothing to decide."""

    config: RunConfig
    splits: dict[str, Tokenized]
    length: int
    limit: int | None
    """The longest row that the positions of the model take."""
    decision: Decision | None = None

    @property
    def long_texts(self) -> LongTexts:
        """As it is stored with the model."""
        return "head" if self.config.long_texts == "auto" else self.config.long_texts


def tokenize_run(
    config: RunConfig, bundle: DataBundle, tokenizer: Any, stored: dict[str, Any], progress: ShowProgress
) -> RunTokens:
    """Tokenizes every split, long rows as `--long_texts` says. `stored` is the config of the model."""
    limit = position_limit(stored)
    most = longest_allowed(tokenizer, model_max=limit, asked=config.max_seq_length, usual=LONGEST_LENGTH)
    length = most if config.long_texts == "full" else min(most, config.max_seq_length or USUAL_LENGTH)

    def run(length: int, long_texts: LongTexts) -> dict[str, Tokenized]:
        return {
            split: tokenize(
                dataset,
                tokenizer,
                bundle.columns,
                max_length=length,
                long_texts=long_texts,
                num_proc=config.preprocessing_num_workers,
                cache_dir=config.cache_dir,
                overwrite_cache=config.overwrite_cache,
                vocab_size=stored.get("vocab_size"),
                on_progress=partial(progress, f"tokenizing {split}"),
            )
            for split, dataset in bundle.splits.items()
        }

    if config.long_texts != "auto":
        return RunTokens(config, run(length, config.long_texts), length, limit)
    splits = run(length, "head")
    decided = None
    if config.recipe != "hf" and config.max_seq_length is None and getattr(tokenizer, "is_fast", False):
        decided = decide_long_texts(whole_lengths(splits["train"]), length, most)
    if decided is None:
        return RunTokens(replace(config, long_texts="head"), splits, length, limit)
    decision, longer = decided
    config = replace(config, long_texts=decision.value)
    if longer == length:
        return RunTokens(config, splits, length, limit, decision)
    return RunTokens(replace(config, max_seq_length=longer), run(longer, "full"), longer, limit, decision)


def whole_lengths(tokenized: Tokenized) -> npt.NDArray[np.int64]:
    """The tokens of each row before it was cut."""
    table = tokenized.dataset.with_format("numpy")
    return np.asarray(table["length"][:], dtype=np.int64) + np.asarray(table["cut"][:], dtype=np.int64)


def decide_long_texts(lengths: npt.NDArray[np.int64], length: int, most: int) -> tuple[Decision, int] | None:
    """What `auto` does about training rows of these lengths, and the row length for it; None: so few are cut.

    Never head_tail: on newsgroup posts cut at 128 tokens it was 6 points below the head (docs/how_to/better_models.md).
    """
    share = float((lengths > length).mean())
    if share < FEW_CUT:
        return None
    why = f"{share:.1%} of the rows are longer than {length} tokens"
    tokens = int(np.minimum(lengths, length).sum())
    longer = most
    while longer > length and np.minimum(lengths, longer).sum() > MOST_TOKENS * tokens:
        longer //= 2
    if longer > length:
        return Decision("long_texts", "full", f"{why}, and the model takes {longer}"), longer
    why += ", which is all the model takes; head_tail is for texts that end with what matters"
    return Decision("long_texts", "head", why), length
