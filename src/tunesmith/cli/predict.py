"""Predict labels and probabilities for new rows, in input order.

For many files, use `--input 'big/*.parquet' --output out/`; the same command resumes an interrupted job.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.cli.parser import add_flag
from tunesmith.cli.standard_streams import print_data
from tunesmith.cli.trained_model import (
    add_model_argument,
    add_reading_arguments,
    chosen_names,
    load_predictor,
    positive,
    predict_dataset,
    raise_on_sigterm,
    read_model_facts,
    reading_options,
    text_columns,
)

FEW_TEXTS = 64
"""Up to this many texts on the command line are predicted on the CPU, unless --bf16 is set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_model_argument(parser)
    add_flag(
        parser,
        "--input FILE",
        "Data to label: csv, tsv, jsonl, parquet or arrow; a quoted pattern or a folder for many files; "
        "-: csv or JSON lines from stdin.",
    )
    add_flag(
        parser,
        "--output FILE",
        "File to write (.csv, .tsv, .jsonl or .parquet), or a folder for many files. Default: csv on stdout.",
    )
    add_flag(
        parser,
        "--text TEXT",
        "Texts to classify. For a pair model, two texts are one pair.",
        nargs="+",
    )
    add_flag(parser, "--text_pair TEXT", "Second text for each --text.", nargs="+")
    add_flag(
        parser,
        "--label_column_name NAME",
        "Ignored; accepted so that train flags can be reused. To score labels, use `tunesmith evaluate`.",
    )
    add_flag(parser, "--top_k K", "Print only the K most probable labels.", type=positive)
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Predict, write the table and return the exit code."""
    from tunesmith.errors import ConfigError
    from tunesmith.inference.model_folder import is_graph_folder
    from tunesmith.inference.tables import check_format
    from tunesmith.runs.folder import require_not_of_a_run
    from tunesmith.runs.writing import require_plain

    if (args.input is None) == (args.text is None):
        raise ConfigError("set either --input FILE or --text")
    raise_on_sigterm()
    if args.output == "-":
        args.output = None
    if is_bulk(args):
        return predict_many(read_model_facts(args), args)
    if args.output is not None:
        check_format(Path(args.output))
        require_plain(Path(args.output))
        require_not_of_a_run(Path(args.output))
        if args.input is not None and os.path.realpath(args.output) == os.path.realpath(args.input):
            raise ConfigError("is the input file", where=args.output, fix="Set a different --output.")
    if args.label_column_name is not None:
        note = (
            f"predict does not read the labels; to score them: tunesmith evaluate {args.run} --test_file {args.input}"
        )
        print(f"tunesmith: note: {note}", file=sys.stderr)
    facts = read_model_facts(args)
    if args.text is not None:
        return _predict_text(facts, args)
    return _predict_plain(facts, args) if is_graph_folder(Path(args.run)) else _predict_file(facts, args)


def _predict_text(facts: Any, args: argparse.Namespace) -> int:
    from tunesmith.errors import ConfigError
    from tunesmith.labels import Task

    texts, pairs = args.text, args.text_pair
    wanted = len(facts.text_columns) if facts.text_columns is not None else (1 if pairs is None else 2)
    if wanted == 2 and pairs is None and len(texts) == 2:
        texts, pairs = texts[:1], texts[1:]
    if (wanted == 2) != (pairs is not None) or (pairs is not None and len(pairs) != len(texts)):
        count = f"{len(texts)} text(s) and {len(pairs or ())} second text(s)"
        raise ConfigError(
            f"this model expects {wanted} text(s) per example, got {count}",
            fix="Quote each text; pass pairs as --text A ... --text_pair B ...",
        )
    if not args.allow_empty_text and not all(text.strip() for text in (*texts, *(pairs or ()))):
        raise ConfigError("--text is empty", fix="Pass a text, or set --allow_empty_text.")
    # A GPU takes longer to start than a CPU needs for a few texts.
    args.use_cpu = args.use_cpu or (len(texts) <= FEW_TEXTS and not args.bf16)
    predictor = load_predictor(args)
    from tunesmith.inference.tables import predicted_names, sorted_scores

    probabilities = predictor.probabilities(texts, pairs)
    labels = predictor.facts.labels
    for number, (name, row) in enumerate(zip(predicted_names(probabilities, labels), probabilities, strict=True)):
        if len(texts) > 1:
            shown = texts[number] if pairs is None else f"{texts[number]} | {pairs[number]}"
            print(f"{shown}: {name}")
        else:
            print(name)
        if labels.task is not Task.REGRESSION:
            for label, value in sorted_scores(row, labels, args.top_k):
                print(f"  {label}  {value:.4f}")
    return 0


def _predict_file(facts: Any, args: argparse.Namespace) -> int:
    from tunesmith.cli.console import Console
    from tunesmith.data.read import read_unlabelled
    from tunesmith.inference.tables import check_cells, choose_column_names, describe_renaming, list_answers

    console = Console()
    given, options = _source(args)
    text = text_columns(args, facts, given)
    reading = partial(console.progress, "reading")
    source = read_unlabelled(given, text=text, on_progress=reading, **options)
    output = None if args.output is None else Path(args.output)
    check_cells(output, {name: source.dataset[name] for name in source.column_names})
    ours = list_answers(facts.labels, args.top_k)
    names = choose_column_names(ours, source.column_names)
    renamed = describe_renaming(ours, names)
    if renamed is not None:
        console.say(renamed)
    predictor = load_predictor(args)
    from tunesmith.inference.tables import answer_columns, probabilities_of

    logits = predict_dataset(predictor, source.dataset, text, console, max_rows=args.batch_size, what="predicting")
    labels = predictor.facts.labels
    columns: dict[str, Any] = {name: source.dataset[name][:] for name in source.column_names}
    answers = answer_columns(probabilities_of(logits, labels.task), labels, args.top_k)
    columns |= dict(zip(names, answers, strict=True))
    return _write_rows(output, columns)


def _predict_plain(facts: Any, args: argparse.Namespace) -> int:
    """Predict a file with an exported model, using only the packages that it needs."""
    from tunesmith.inference.bulk import label_columns, read_whole
    from tunesmith.inference.tables import check_cells

    options = reading_options(args)
    empty = options.pop("allow_empty_text")
    options.pop("sheet_name", None)
    asked = chosen_names(args) or facts.text_columns
    output = None if args.output is None else Path(args.output)
    columns = read_whole(args.input, options)
    check_cells(output, columns)
    columns = label_columns(load_predictor(args), columns, tuple(asked or ("text",)), args.top_k, allow_empty=empty)
    return _write_rows(output, columns)


def _write_rows(output: Path | None, columns: dict[str, Any]) -> int:
    from tunesmith.inference.tables import write_delimited, write_table

    if output is None:
        write_delimited(print_data(sys.stdout), columns, ",")
    else:
        write_table(output, columns)
        print(f"{output}: {len(next(iter(columns.values()))):,} rows", file=sys.stderr)
    return 0


def _source(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the input (a file, or the rows of stdin) and the options to read it."""
    options = reading_options(args)
    if args.input != "-":
        return Path(args.input), options
    from tunesmith.data.row_blocks import read_stdin

    return read_stdin(**{name: options.pop(name) for name in ("encoding", "delimiter", "quoting")}), options


def is_bulk(args: argparse.Namespace) -> bool:
    """Return whether the input is a pattern or folder, or the output a folder."""
    if args.input in (None, "-"):
        return False
    many = any(c in args.input for c in "*?[") or os.path.isdir(args.input) or "://" in args.input
    out = args.output is not None and (args.output.endswith("/") or os.path.isdir(args.output) or "://" in args.output)
    return many or out


def predict_many(facts: Any, args: argparse.Namespace) -> int:
    """Predict many files into a folder and return the exit code."""
    from tunesmith.errors import ConfigError
    from tunesmith.inference.bulk import BulkJob, find_inputs, is_resumable, run_job

    for flag in ("input", "output"):
        if "://" in (getattr(args, flag) or ""):
            fix = "Copy or mount the files, or use Ray Data or Spark (tunesmith.integrations)."
            raise ConfigError(f"--{flag} doesn't accept a URL", where=getattr(args, flag), fix=fix)
    if args.output is None or (Path(args.output).suffix and not args.output.endswith("/")):
        raise ConfigError("many input files need an output folder", fix="Set --output FOLDER/.")
    text = chosen_names(args) or facts.text_columns
    if text is None:
        raise ConfigError("the text columns of this model are not known", fix="Set --text_column_names.")
    options = reading_options(args)
    empty = options.pop("allow_empty_text")
    options.pop("sheet_name", None)
    output = Path(args.output)
    job = BulkJob(find_inputs(args.input), output, tuple(text), args.top_k, options, empty, args.bf16)
    if is_resumable(output):
        print(f"{output}: resuming; finished parts are kept", file=sys.stderr)
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        print(f"{done:,} rows predicted", file=sys.stderr)

    run_job(job, load_predictor(args), count)
    print(f"{output}: complete", file=sys.stderr)
    return 0
