"""Everything that can be refused before torch is imported: config, run folder, examples, tokens.

Options that `tunesmith train` can't carry out are refused, never ignored.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunesmith.config.load import DATA_SOURCES, load_config, raise_problems
from tunesmith.config.options import RunConfig, to_dict
from tunesmith.data.audit import (
    MOST_TOKENIZED,
    audit_rows,
    check_cut,
    check_tokens,
    require_clean,
    sample_rows,
    sort_findings,
)
from tunesmith.data.columns import quoted
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
from tunesmith.errors import CheckpointError, ConfigError, TunesmithError
from tunesmith.events import Finding, RunEnded, RunStarted
from tunesmith.inference.tables import describe_renaming, names_of_run
from tunesmith.labels import LabelMap, Task, match_names
from tunesmith.models.files import load_tokenizer, position_limit, read_config_file, require_segments, resolve_model
from tunesmith.models.load import head_mismatch, read_head_names, read_model_config
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir, end_of, is_run, require_own_folder

if TYPE_CHECKING:
    from tunesmith.pipeline.gold import Gold
    from tunesmith.pipeline.train import Log, ShowProgress


def complete_config(
    config: RunConfig | None, options: Mapping[str, Any], *, in_memory: bool, one_of_many: bool = False
) -> RunConfig:
    """Return the config updated with the options, checked like a command line.

    `in_memory`: the training data is passed as a table. `one_of_many`: the run is part of `--recipe best`.
    """
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if given or config is None:
        config = load_config(None, given, need_data=not in_memory, start=config)
    named = next((name for name in DATA_SOURCES if getattr(config, name) is not None), None)
    if in_memory and named not in (None, "task_name"):
        raise ConfigError(f"both train_data and {named} are set", fix="Set one source of training data.")
    if config.trains_several:
        raise ConfigError(
            "folds and seeds train several runs, and finetune trains one",
            fix="Call tunesmith.pipeline.folds.run_repeats(config, RunObserver()), or set one fold.",
        )
    refuse_what_is_not_built(config, one_of_many=one_of_many)
    return config


def refuse_what_is_not_built(config: RunConfig, *, one_of_many: bool = False) -> None:
    """Raise a ConfigError that lists every option without effect in a single run.

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


# The run folder

NOT_COMPARED = frozenset(
    ["output_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "logging_steps", "cache_dir"]
)
"""Options that do not change the experiment."""
INPUTS = (
    *("model_name_or_path", "tokenizer_name", "dataset_name"),
    *("train_file", "validation_file", "test_file", "gold_file", "labels_file"),
)
"""Options that may name a folder or file that the run reads."""


def choose_folder(config: RunConfig, log: Log, *, in_memory: bool = False) -> RunConfig:
    """Return the config with its run folder; refuse a finished run before anything loads.

    Without `output_dir`, a folder that contains a run with different settings is skipped, and so is a finished run on data in
    memory, which no config identifies. The folder that is used instead is printed.
    """
    first = config.run_folder
    if config.output_dir is not None or config.resume_from_checkpoint:
        run = RunDir(first)
        if end_of(run) is not None:
            raise finished_error(run, same=_has_same_settings(config, run))
        if config.resume_from_checkpoint and not run.checkpoints():
            raise CheckpointError(
                "contains no checkpoint to resume from",
                where=str(run.path),
                fix="Omit --resume_from_checkpoint to start the run, or set --output_dir to the folder of the run.",
            )
        return config
    for folder in numbered(first):
        run = RunDir(folder)
        if not os.path.isfile(run.config_file):  # False for a name that no file can have
            break
        if _has_same_settings(config, run):
            if end_of(run) is None:
                break
            if not in_memory:
                raise finished_error(run, same=True)
    if folder == first:
        return config
    log(f"{first} contains a run with different settings or data: this run is written to {folder}.")
    return replace(config, output_dir=str(folder))


def numbered(folder: Path) -> Iterator[Path]:
    """Yield the folder, folder-2, folder-3, ..."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in count(2))


def free_folder(folder: Path) -> Path:
    """Return the first of folder, folder-2, folder-3, ... that is new, empty or contains an unfinished run."""
    for name in numbered(folder):
        run = RunDir(name)
        if not os.path.lexists(name) or (name.is_dir() and not any(name.iterdir())):
            return name
        if is_run(run) and end_of(run) is None and not run.report_file.exists():
            return name
    raise AssertionError


def require_usable(config: RunConfig) -> RunDir:
    """Return the run folder; raise a ResourceError if it contains files that the run would overwrite or read."""
    run = RunDir(config.run_folder)
    require_own_folder(run, {name: getattr(config, name) for name in INPUTS})
    return run


def refuse_another_run(run: RunDir, run_id: str) -> None:
    """Refuse to overwrite a finished run, or results of a different config without a checkpoint to compare with."""
    finished = end_of(run) is not None
    if run.checkpoints() and not finished:
        return  # stopped: the checkpoints say whether it is the same run
    events = read_journal(run.journal_file) if run.journal_file.exists() else []
    same = next((e.run_id for e in events if isinstance(e, RunStarted)), None) == run_id
    if finished or any(isinstance(e, RunEnded) and e.finished for e in events[-1:]):
        raise finished_error(run, same=same)
    results = [p.name for p in (run.model, *run.result_files, run.report_file) if p.exists()]
    if results and not same:
        kind = "of a different config" if events else f"without their event log ({run.journal_file.name})"
        raise CheckpointError(
            f"contains results ({', '.join(results[:3])}) {kind}",
            where=str(run.path),
            fix="Set a different --output_dir, or remove the folder to train again.",
        )


def finished_error(run: RunDir, *, same: bool) -> CheckpointError:
    """Return the error for a folder whose run must not be overwritten."""
    report = "" if run.report_file.exists() else f" `tunesmith report {run.path}` writes its report."
    return CheckpointError(
        f"contains a finished run of {'this' if same else 'a different'} config",
        where=str(run.path),
        fix=f"Set a different --output_dir or --run_name, or remove the folder to train again.{report}",
    )


def _has_same_settings(config: RunConfig, run: RunDir) -> bool:
    if not run.config_file.is_file():
        return False
    try:
        stored = to_dict(load_config(run.config_file, need_data=False))
    except TunesmithError:
        return True  # damaged: the run itself decides about the folder
    usual = to_dict(RunConfig())
    # run.yaml contains the values that the recipe chose: an option that is not set is not a difference.
    return all(
        value in (stored[name], usual[name]) for name, value in to_dict(config).items() if name not in NOT_COMPARED
    )


# The examples


@dataclass(frozen=True)
class RunData:
    """The splits, the folder of the model, and the label names of its head."""

    bundle: DataBundle
    folder: Path
    new_head: bool
    notes: tuple[str, ...]
    gold: Gold | None = None


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
        need_weights=need_weights,
    )
    head = read_head_names(read_config_file(folder))
    bundle = load_data(config, data, head_names=head, on_progress=lambda done, total: progress("reading", done, total))
    gold = None
    if config.gold_file is not None:
        from tunesmith.pipeline.gold import take_gold

        bundle, gold = take_gold(bundle)
    if not use_test:
        rows, parts = dict(bundle.splits), dict(bundle.parts)
        rows.pop("test", None), parts.pop("test", None)
        bundle = replace(bundle, splits=rows, parts=parts)
    found = _match_head(bundle, folder, head, allow_new=config.ignore_mismatched_sizes)
    findings = audit_rows(bundle.parts, bundle.columns, bundle.labels)
    require_clean(findings, strict=config.strict_data)
    return replace(found, bundle=replace(bundle, findings=tuple(findings)), gold=gold)


def load_run_tokenizer(config: RunConfig, folder: Path) -> Any:
    """Load the tokenizer of the model folder, or the one that the config names."""
    if config.tokenizer_name is None:
        return load_tokenizer(folder)
    return load_tokenizer(config.tokenizer_name, cache_dir=config.cache_dir)


SHOWN_LABELS = 4


def log_data(log: Log, data: RunData) -> None:
    """Print how the data was read, the size of each split, and warnings."""
    bundle = data.bundle
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in bundle.splits.items())
    label = f"label {bundle.columns.label!r} ({_describe_labels(bundle.labels)})"
    log(f"Data: {sizes} rows; text {quoted(bundle.columns.named)}, {label}.")
    ours = names_of_run(bundle.columns.text, bundle.labels)
    for note in (*bundle.notes, *data.notes, describe_renaming(ours, ours.values())):
        if note is not None:
            log(note)
    for finding in bundle.findings:
        if finding.severity != "info":
            log(finding.line())


def _describe_labels(labels: LabelMap) -> str:
    if labels.task is Task.REGRESSION:
        return "a number"
    names = ", ".join(labels.names[:SHOWN_LABELS]) + (", ..." if len(labels) > SHOWN_LABELS else "")
    return f"{'any' if labels.task is Task.MULTILABEL else 'one'} of {len(labels)}: {names}"


def _match_head(bundle: DataBundle, folder: Path, head: tuple[str, ...], *, allow_new: bool) -> RunData:
    labels = bundle.labels
    if labels.task is Task.REGRESSION or not head or len(head) != len(labels):
        return RunData(bundle, folder, False, ())  # loading refuses a head of a different size
    if match_names(head, labels.names) == labels.names:
        note = f"Labels: in the order of the model's head, {', '.join(labels.names[:8])}."
        return RunData(bundle, folder, False, (note,))
    if allow_new:
        note = f"The model's head was trained for {', '.join(head[:8])}: it is re-initialized."
        return RunData(bundle, folder, True, (note,))
    raise head_mismatch(head, labels.names, str(folder))


# The tokens


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
    tokenizer: Any
    splits: dict[str, Tokenized]
    length: int
    limit: int | None
    """The longest row that the model's positions support."""
    decision: Decision | None = None

    @property
    def long_texts(self) -> LongTexts:
        """Return the value that is stored with the model."""
        return "head" if self.config.long_texts == "auto" else self.config.long_texts


def tokenize_run(config: RunConfig, data: RunData, progress: ShowProgress) -> RunTokens:
    """Tokenize every split; `--long_texts` determines how long rows are read."""
    bundle, stored = data.bundle, read_model_config(data.folder)
    tokenizer = load_run_tokenizer(config, data.folder)
    require_segments(tokenizer, stored, pair=len(bundle.columns.text) == 2, where=str(data.folder))
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
        return RunTokens(config, tokenizer, run(length, config.long_texts), length, limit)
    splits = run(length, "head")
    decided = None
    if config.recipe != "hf" and config.max_seq_length is None and getattr(tokenizer, "is_fast", False):
        decided = decide_long_texts(whole_lengths(splits["train"]), length, most)
    if decided is None:
        return RunTokens(replace(config, long_texts="head"), tokenizer, splits, length, limit)
    decision, longer = decided
    config = replace(config, long_texts=decision.value)
    if longer == length:
        return RunTokens(config, tokenizer, splits, length, limit, decision)
    config = replace(config, max_seq_length=longer)
    return RunTokens(config, tokenizer, run(longer, "full"), longer, limit, decision)


def audit_tokens(data: RunData, tokens: RunTokens, log: Log, *, asked: int | None) -> RunData:
    """Print how much is truncated, check a sample for unknown tokens, and return the data with these findings.

    `asked` is the maximum length that the user set.
    """
    bundle = data.bundle
    found = [
        *_check_texts(bundle, tokens.tokenizer),
        *check_cut(whole_lengths(tokens.splits["train"]), tokens.length, tokens.limit),
    ]
    for finding in found:
        if finding.severity != "info":
            log(finding.line())
    require_clean(found, strict=tokens.config.strict_data)
    lowered = describe_lowered_length(asked, tokens.length)
    if lowered is not None:
        log(lowered)
    for split, part in tokens.splits.items():
        if part.truncated.rows_cut:
            log(f"Cut: {part.truncated.sentence(split)}.")
        if part.empty:
            log(describe_empty(split, part.empty, bundle.parts[split]))
    return replace(data, bundle=replace(bundle, findings=tuple(sort_findings([*bundle.findings, *found]))))


def whole_lengths(tokenized: Tokenized) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each row before truncation."""
    return tokenized.rows.lengths.astype(np.int64) + tokenized.cut


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
    train = sample_rows(bundle.parts["train"], list(bundle.columns.text), MOST_TOKENIZED).columns
    rows = tokenizer(*train.values(), truncation=False, verbose=False)["input_ids"]
    length = longest_allowed(tokenizer, model_max=limit, asked=asked)
    return [*_check_texts(bundle, tokenizer), *check_cut(np.array([len(row) for row in rows]), length, limit)]


def _check_texts(bundle: DataBundle, tokenizer: Any) -> list[Finding]:
    names = list(bundle.columns.text)
    samples = [sample_rows(part, names, MOST_TOKENIZED).columns for part in bundle.parts.values() if len(part)]
    return check_tokens([text for columns in samples for texts in columns.values() for text in texts], tokenizer)
