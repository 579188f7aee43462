"""The rows of a run as tokens, what the model is shown of rows that are too long for it, and what the tokenizer makes of the
texts, as findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.audit.readable import MOST_ROWS, check_cut, check_tokens
from tunesmith.audit.row_audit import require_clean, sort_findings
from tunesmith.audit.text_survey import sample_rows
from tunesmith.config.schema import RunConfig
from tunesmith.encoder.resolve import position_limit
from tunesmith.findings import Finding
from tunesmith.reading.load import DataBundle
from tunesmith.recipes.deciding import Decision
from tunesmith.session.watch import Say, ShowProgress
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


def audit_texts(bundle: DataBundle, tokenizer: Any, *, asked: int | None, limit: int | None) -> list[Finding]:
    """From a sample of each split: unknown tokens, scripts, languages, and how many rows would be cut."""
    names = list(bundle.columns.text)
    samples = {split: sample_rows(part, names, MOST_ROWS).columns for split, part in bundle.parts.items() if len(part)}
    texts = {split: [text for name in names for text in columns[name]] for split, columns in samples.items()}
    train = samples["train"]
    rows = tokenizer(*(train[name] for name in names), truncation=False, verbose=False)["input_ids"]
    length = longest_allowed(tokenizer, model_max=limit, asked=asked)
    return [*check_tokens(texts, tokenizer), *_cut(np.array([len(row) for row in rows]), length, limit)]


def audit_tokenized(
    bundle: DataBundle, tokenizer: Any, train: Tokenized, *, length: int, limit: int | None
) -> list[Finding]:
    """The same for a run, whose rows are tokenized already."""
    names = list(bundle.columns.text)
    samples = {split: sample_rows(part, names, MOST_ROWS).columns for split, part in bundle.parts.items() if len(part)}
    texts = {split: [text for name in names for text in columns[name]] for split, columns in samples.items()}
    table = train.dataset.with_format("numpy")
    return [
        *check_tokens(texts, tokenizer),
        *_cut(np.asarray(table["length"][:]) + np.asarray(table["cut"][:]), length, limit),
    ]


def add_findings(bundle: DataBundle, findings: Sequence[Finding], say: Say, *, strict: bool) -> DataBundle:
    """The bundle with findings added, most serious first; warnings are shown."""
    for finding in findings:
        if finding.severity != "info":
            say(finding.line())
    require_clean(findings, strict=strict)
    return replace(bundle, findings=tuple(sort_findings([*bundle.findings, *findings])))


def _cut(lengths: Any, length: int, limit: int | None) -> list[Finding]:
    over = np.maximum(lengths - length, 0)
    longest = int(np.quantile(lengths, 0.99)) if len(lengths) else 0
    return check_cut(len(lengths), int((over > 0).sum()), int(lengths.sum()), int(over.sum()), longest, limit, length)
