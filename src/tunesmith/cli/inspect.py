"""`tunesmith inspect`: what the model sees of the data. Tokens, ids, types, mask; lengths; truncation; padding."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tunesmith.cli.parser import add_config_arguments, add_flag, config_from_args
from tunesmith.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "--rows N,N", "Rows to show token by token, counted from 0. [0]", default="0")
    add_flag(parser, "--split NAME", "Split whose rows are shown. [train]", default="train")
    add_flag(parser, "--batch_size N", "Batch size for the padding table. [8]", type=int)
    add_config_arguments(parser, ("Data", "Columns and reading", "Tokens and batches", "Model"), positional=True)


def run(args: argparse.Namespace) -> int:
    """Prints the page; gives the exit code."""
    config = config_from_args(args)
    batch_size = config.decided.per_device_train_batch_size if args.batch_size is None else args.batch_size
    if batch_size < 1:
        raise ConfigError(f"--batch_size {batch_size} is not a positive number of rows")
    wanted = _parse_rows(args.rows)
    bundle, tokenizer, max_length, tokenized = prepare_rows(config)
    if args.split not in tokenized:
        raise ConfigError(f"there is no split {args.split!r}", fix=f"There are: {', '.join(tokenized)}.")
    shown = tokenized[args.split]
    for row in wanted:
        if row >= len(shown.rows):
            raise ConfigError(f"--rows {row}: {args.split} has rows 0 to {len(shown.rows) - 1}")
    plain = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
    sections = (
        describe_data(bundle, tokenizer, max_length),
        show_rows(bundle.splits[args.split], shown, tokenizer, bundle, wanted),
        describe_lengths(tokenized, max_length, shown=args.split, ascii_only=plain),
        describe_padding(shown.rows.lengths, batch_size, max_length, config),
    )
    print("\n\n".join("\n".join(lines) for lines in sections))
    return 0


def prepare_rows(config: Any) -> tuple[Any, Any, int, dict[str, Any]]:
    """The data, the tokenizer, the longest row allowed, and every split tokenized."""
    from dataclasses import replace
    from functools import partial

    from tunesmith.cli.console import Console, quiet_libraries
    from tunesmith.data.tokenize import longest_allowed, tokenize
    from tunesmith.models.files import load_tokenizer, position_limit, read_config_file, require_segments
    from tunesmith.pipeline.inputs import read_run_data

    quiet_libraries()
    console = Console()
    # Whatever is in the file can be looked at; labels that do not fit the model are a matter of training.
    data = read_run_data(
        replace(config, allow_single_label=True, ignore_mismatched_sizes=True), {}, console.progress, need_weights=False
    )
    bundle, folder = data.bundle, data.folder
    source = {"revision": config.model_revision, "allow_download": config.allow_download}
    tokenizer = load_tokenizer(config.tokenizer_name, **source) if config.tokenizer_name else load_tokenizer(folder)
    stored = read_config_file(folder)
    require_segments(tokenizer, stored, pair=len(bundle.columns.text) == 2, where=str(folder))
    max_length = longest_allowed(tokenizer, model_max=position_limit(stored), asked=config.max_seq_length)
    tokenized = {
        split: tokenize(
            rows,
            tokenizer,
            bundle.columns,
            max_length=max_length,
            num_proc=config.preprocessing_num_workers,
            cache_dir=config.cache_dir,
            overwrite_cache=config.overwrite_cache,
            vocab_size=stored.get("vocab_size"),
            on_progress=partial(console.progress, f"tokenizing {split}"),
        )
        for split, rows in bundle.splits.items()
    }
    console.close()
    return bundle, tokenizer, max_length, tokenized


def describe_data(bundle: Any, tokenizer: Any, max_length: int) -> list[str]:
    """Splits, columns, labels, and the tokenizer."""
    sizes = ", ".join(f"{name} {len(rows)}" for name, rows in bundle.splits.items())
    kind = "pairs of texts" if len(bundle.columns.text) == 2 else "single texts"
    types = "with" if "token_type_ids" in tokenizer.model_input_names else "without"
    names = ", ".join(bundle.labels.names[:8]) + (", ..." if len(bundle.labels.names) > 8 else "")
    return [
        f"data       {sizes} rows; {kind} from {' + '.join(bundle.columns.text)}",
        f"task       {bundle.labels.task.value}: {names}",
        f"tokenizer  {type(tokenizer).__name__}, {len(tokenizer)} tokens, {types} token types, rows of at most {max_length}",
        *(f"note       {note}" for note in bundle.notes),
        *(f"warning    {f.line().partition(': ')[2]}" for f in bundle.findings if f.severity != "info"),
    ]


def show_rows(dataset: Any, tokenized: Any, tokenizer: Any, bundle: Any, rows: Sequence[int]) -> list[str]:
    """Each row token by token, padded to the longest of them as a batch would be."""
    lines: list[str] = []
    width = max(int(tokenized.rows.lengths[row]) for row in rows)
    for row in rows:
        source, stored = dataset[row], tokenized.dataset[row]
        ids = stored["input_ids"]
        lines.append(f"row {row}   label: {_label_text(source.get('labels'), bundle.labels)}")
        lines += [f"  {name}: {source[name]}" for name in bundle.columns.text]
        cut = f", {stored['cut']} more were cut" if stored["cut"] else ""
        lines.append(f"  {len(ids)} tokens{cut}; padded to {width} in a batch of the rows shown here")
        columns = [
            ["token", *tokenizer.convert_ids_to_tokens(ids)],
            ["id", *map(str, ids)],
            *([["type", *map(str, stored["token_type_ids"])]] if "token_type_ids" in stored else []),
            ["mask", *["1"] * len(ids)],
        ]
        if width > len(ids):
            padding = [f"{tokenizer.pad_token} x{width - len(ids)}", str(tokenizer.pad_token_id), "0", "0"]
            for column, cell in zip(columns, [*padding[: len(columns) - 1], "0"], strict=True):
                column.append(cell) if tokenizer.padding_side == "right" else column.insert(1, cell)
        lines += [f"  {line}".rstrip() for line in _wrap_table(columns)]
        lines.append("")
    return lines[:-1]


def describe_lengths(tokenized: dict[str, Any], max_length: int, *, shown: str, ascii_only: bool) -> list[str]:
    """Lengths of every split, the histogram of one, and what is cut."""
    import numpy as np

    from tunesmith.data.lengths import count_lengths, draw_histogram, summarize_lengths

    lines = ["tokens a row   rows  shortest   mean  median    95%  longest"]
    whole = {}
    for name, split in tokenized.items():
        table = split.dataset.with_format("numpy")
        whole[name] = np.asarray(table["length"][:]) + np.asarray(table["cut"][:])
        s = summarize_lengths(whole[name])
        lines.append(f"  {name:<10} {s.rows:>6} {s.shortest:>9} {s.mean:>6.1f} {s.median:>7} {s.p95:>6} {s.longest:>8}")
    lines += ["", f"{shown}, before cutting:"]
    bins = count_lengths(whole[shown])
    lines += [f"  {line}" for line in draw_histogram(bins, max_length=max_length, ascii_only=ascii_only)]
    lines += ["", *[f"  {split.truncated.sentence(name)}" for name, split in tokenized.items()]]
    return lines


def describe_padding(lengths: Any, batch_size: int, max_length: int, config: Any) -> list[str]:
    """What padding costs with three ways of making batches."""
    from tunesmith.data.lengths import compare_padding

    seed = config.seed if config.data_seed is None else config.data_seed
    ways = compare_padding(
        lengths, batch_size=batch_size, max_length=max_length, seed=seed, shuffle_window=config.shuffle_window
    )
    lines = [f"padding in batches of {batch_size}"]
    lines += [f"  {way.way:<52} {100 * way.share:5.1f}% of {way.padded} places" for way in ways]
    return lines


def _parse_rows(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--rows {text!r} is not a list of row numbers", fix="Write them as 0,5,17.")
    return [int(part) for part in parts]


def _label_text(label: Any, labels: Any) -> str:
    if label is None or label == -1:
        return "(none)"
    if isinstance(label, list):
        return ", ".join(name for name, on in zip(labels.names, label, strict=True) if on) or "(none of them)"
    if isinstance(label, float):
        return f"{label:g}"
    name = labels.names[label]
    return str(name) if name == str(label) else f"{name} ({label})"


def _wrap_table(rows: list[list[str]]) -> Iterator[str]:
    """Columns of like width side by side, wrapped to the terminal; the first column is repeated as the heading."""
    limit = max(60, shutil.get_terminal_size((100, 24)).columns - 4)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    start = 1
    while start < len(widths):
        end, used = start, widths[0]
        while end < len(widths) and (end == start or used + widths[end] + 1 <= limit):
            used += widths[end] + 1
            end += 1
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(start, end))]
            yield " ".join(cells).rstrip()
        if end < len(widths):
            yield ""
        start = end
