"""Read, check, tokenize and audit the examples of a run, and find the folder of its model, all before torch is imported.

Options that `tunesmith train` can't carry out are refused, never ignored.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunesmith.config.load import raise_problems
from tunesmith.config.options import RunConfig
from tunesmith.data.audit import MOST_TOKENIZED, audit_rows, check_cut, check_tokens, require_clean, sample_rows
from tunesmith.data.read import DataBundle, load_data
from tunesmith.data.tokenize import (
    LONGEST_LENGTH,
    USUAL_LENGTH,
    LongTexts,
    Tokenized,
    describe_empty,
    describe_lowered_length,
    longest_allowed,
    tokenize,
)
from tunesmith.events import Finding
from tunesmith.inference.tables import describe_renaming, names_of_run
from tunesmith.labels import Task
from tunesmith.models.files import load_tokenizer, position_limit, read_config_file, resolve_model
from tunesmith.models.load import HeadNames, read_head_names

if TYPE_CHECKING:
    from tunesmith.pipeline.train import Log, ShowProgress


@dataclass(frozen=True)
class RunData:
    """The splits, the folder of the model, and the label names of its head."""

    bundle: DataBundle
    folder: Path
    new_head: bool
    notes: tuple[str, ...]


def read_run_data(
    config: RunConfig,
    data: Mapping[str, Any],
    progress: ShowProgress,
    *,
    need_weights: bool = True,
    use_test: bool = True,
) -> RunData:
    """Find the model, then read the data; labels are in the order of the model's head, if it has one."""
    folder = resolve_model(
        config.model_name_or_path,
        revision=config.model_revision,
        cache_dir=config.cache_dir,
        allow_download=config.allow_download,
        need_weights=need_weights,
    )
    head = read_head_names(read_config_file(folder))
    bundle = load_data(
        config, data, head_names=head.names, on_progress=lambda done, total: progress("reading", done, total)
    )
    if not use_test:
        rows, parts = dict(bundle.splits), dict(bundle.parts)
        rows.pop("test", None), parts.pop("test", None)
        bundle = replace(bundle, splits=rows, parts=parts)
    found = _match_head(bundle, folder, head, allow_new=config.ignore_mismatched_sizes)
    findings = audit_rows(bundle.parts, bundle.columns, bundle.labels, names_given=bundle.names_given)
    require_clean(findings, strict=config.strict_data)
    return replace(found, bundle=replace(bundle, findings=tuple(findings)))


def load_run_tokenizer(config: RunConfig, folder: Path) -> Any:
    """Load the tokenizer of the model folder, or the one that the config names."""
    if config.tokenizer_name is None:
        return load_tokenizer(folder)
    return load_tokenizer(config.tokenizer_name, cache_dir=config.cache_dir, allow_download=config.allow_download)


def log_data(log: Log, data: RunData) -> None:
    """Print how the data was read, the size of each split, and warnings."""
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in data.bundle.splits.items())
    ours = names_of_run(data.bundle.columns.text, data.bundle.labels)
    for note in (*data.bundle.notes, *data.notes, describe_renaming(ours, ours.values()), f"Rows: {sizes}."):
        if note is not None:
            log(note)
    for finding in data.bundle.findings:
        if finding.severity != "info":
            log(finding.line())


def _match_head(bundle: DataBundle, folder: Path, head: HeadNames, *, allow_new: bool) -> RunData:
    labels = bundle.labels
    if labels.task is Task.REGRESSION or not head.names or len(head.names) != len(labels):
        return RunData(bundle, folder, False, ())  # loading refuses a head of a different size
    if head.fits(labels.names):
        note = f"Labels: in the order of the model's head, {', '.join(labels.names[:8])}."
        return RunData(bundle, folder, False, (note,))
    if allow_new:
        note = f"The model's head was trained for {', '.join(head.names[:8])}: it is re-initialized."
        return RunData(bundle, folder, True, (note,))
    raise head.refusal(labels.names, str(folder))


def refuse_what_is_not_built(config: RunConfig, *, one_of_many: bool = False) -> None:
    """Raise a ConfigError that lists every option without effect in `tunesmith train`.

    `one_of_many`: the run is part of `--recipe best`.
    """
    trackers = [name for name in config.report_to if name not in ("none", "all") and not is_installed(name)]
    fix = "Run: pip install 'tunesmith[trackers]', or omit it: journal.jsonl contains every value."
    problems = [f"--report_to {name} needs the package {name}. {fix}" for name in trackers]
    if config.recipe == "best" and not one_of_many:
        problems.append(
            "--recipe best trains several models. Use `tunesmith train`, or tunesmith.tuning.best.run_best."
        )
    elif config.time_budget is not None and not one_of_many:
        problems.append("--time_budget requires --recipe best (or `tunesmith search`).")
    raise_problems(problems)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of that name (W&B creates ./wandb) is not a package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


@dataclass(frozen=True)
class Decision:
    """One option, its value, and the reason."""

    name: str
    value: Any
    reason: str

    def line(self) -> str:
        """Return the decision as one line."""
        shown = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        shown = shown.lower() if isinstance(self.value, bool) else shown
        return f"{self.name} {shown}: {self.reason}"


FEW_CUT = 0.02
"""Share of the training rows that may be truncated before `auto` reacts."""
MOST_TOKENS = 2.0
"""Maximum number of tokens for which `auto` reads whole texts, relative to truncated ones."""


@dataclass(frozen=True)
class RunTokens:
    """The tokenized splits. `config.long_texts` is decided; `decision` is None if there was nothing to decide."""

    config: RunConfig
    splits: dict[str, Tokenized]
    length: int
    limit: int | None
    """The longest row that the model's positions support."""
    decision: Decision | None = None

    @property
    def long_texts(self) -> LongTexts:
        """Return the value that is stored with the model."""
        return "head" if self.config.long_texts == "auto" else self.config.long_texts


def tokenize_run(
    config: RunConfig, bundle: DataBundle, tokenizer: Any, stored: dict[str, Any], progress: ShowProgress
) -> RunTokens:
    """Tokenize every split; `--long_texts` determines how long rows are read. `stored` is the config of the model."""
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
                cache_dir=config.cache_dir,
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


def log_lengths(log: Log, tokenized: dict[str, Tokenized], length: int, bundle: DataBundle, asked: int | None) -> None:
    """Print how much of each split was truncated."""
    lowered = describe_lowered_length(asked, length)
    if lowered is not None:
        log(lowered)
    cut = {split: t.truncated for split, t in tokenized.items() if t.truncated.rows_cut}
    for split, count in cut.items():
        log(f"Cut: {count.sentence(split)}.")
    if not cut:
        log(f"Tokens: no row is longer than {length}, so nothing is truncated.")
    for split, part in tokenized.items():
        if part.empty:
            log(describe_empty(split, part.empty, bundle.parts[split]))


def whole_lengths(tokenized: Tokenized) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each row before truncation."""
    table = tokenized.dataset.with_format("numpy")
    return np.asarray(table["length"][:], dtype=np.int64) + np.asarray(table["cut"][:], dtype=np.int64)


def decide_long_texts(lengths: npt.NDArray[np.int64], length: int, most: int) -> tuple[Decision, int] | None:
    """Decide how `auto` reads training rows of these lengths, and the maximum length; None if few rows are truncated.

    Never head_tail: on newsgroup posts truncated at 128 tokens it was 6 points below the head (docs/research/recipes.md).
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
        return Decision("long_texts", "full", f"{why}, and the model accepts {longer}"), longer
    why += ", which is the limit of the model; use head_tail if the end of a text matters"
    return Decision("long_texts", "head", why), length


def audit_texts(bundle: DataBundle, tokenizer: Any, *, asked: int | None, limit: int | None) -> list[Finding]:
    """Check a sample of each split for unknown tokens, and count the rows that would be truncated."""
    samples = _samples(bundle)
    rows = tokenizer(*samples["train"].values(), truncation=False, verbose=False)["input_ids"]
    length = longest_allowed(tokenizer, model_max=limit, asked=asked)
    return [*_check_texts(samples, tokenizer), *_cut(np.array([len(row) for row in rows]), length, limit)]


def audit_tokenized(
    bundle: DataBundle, tokenizer: Any, train: Tokenized, *, length: int, limit: int | None
) -> list[Finding]:
    """Run `audit_texts` for rows that are already tokenized."""
    return [*_check_texts(_samples(bundle), tokenizer), *_cut(whole_lengths(train), length, limit)]


def _samples(bundle: DataBundle) -> dict[str, dict[str, list[str]]]:
    """Return texts by split and column."""
    names = list(bundle.columns.text)
    return {
        split: sample_rows(part, names, MOST_TOKENIZED).columns for split, part in bundle.parts.items() if len(part)
    }


def _check_texts(samples: Mapping[str, dict[str, list[str]]], tokenizer: Any) -> list[Finding]:
    return check_tokens(
        {split: [t for texts in found.values() for t in texts] for split, found in samples.items()}, tokenizer
    )


def _cut(lengths: Any, length: int, limit: int | None) -> list[Finding]:
    over = np.maximum(lengths - length, 0)
    longest = int(np.quantile(lengths, 0.99)) if len(lengths) else 0
    return check_cut(len(lengths), int((over > 0).sum()), int(lengths.sum()), int(over.sum()), longest, limit, length)
