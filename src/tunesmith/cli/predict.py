"""Predict labels and probabilities for new rows, in input order.

For many files, use `--input 'big/*.parquet' --output out/`; the same command resumes an interrupted job.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.cli.main import raise_on_sigterm
from tunesmith.cli.parser import MODEL, add_flags
from tunesmith.config.options import Reading

FEW_TEXTS = 64
"""Up to this many texts on the command line are predicted on the CPU, unless --bf16 is set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags = {
        "--input FILE": "Data to label: csv, tsv, jsonl, xlsx, parquet or arrow; a quoted pattern or a folder for many files; "
        "-: csv or JSON lines from stdin.",
        "--output FILE": "File to write (.csv, .tsv, .jsonl or .parquet), or a folder for many files. Default: csv on stdout.",
        "--text TEXT...": "Texts to classify. For a pair model, two texts are one pair.",
        "--text_pair TEXT...": "Second text for each --text.",
        "--label_column_name NAME": "Label column of --calibration_file. To score labels, use `tunesmith evaluate`.",
        "--top_k K": "Print only the K most probable labels.",
        "--max_error RATE": "Add a column answered: true if the model is sure enough for this error rate, such as 0.02, "
        "at a confidence of 0.95.",
        "--max_error_per_class": "Keep the limit of --max_error for every predicted class.",
        "--calibration_file FILE": "Labeled examples for --max_error. Default: the validation examples of the run.",
    }
    add_flags(parser, MODEL | flags | READING)


def run(args: argparse.Namespace) -> int:
    """Predict, write the table and return the exit code."""
    from tunesmith.errors import ConfigError
    from tunesmith.files import require_plain
    from tunesmith.inference.tables import check_format
    from tunesmith.runs.folder import require_not_of_a_run

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
    if args.label_column_name is not None and args.calibration_file is None:
        note = f"labels are not read. To score them, run: tunesmith evaluate {args.run} --test_file {args.input}"
        print(f"tunesmith: note: {note}", file=sys.stderr)
    facts = read_model_facts(args)
    if args.text is not None:
        return _predict_text(facts, args)
    return _predict_file(facts, args)


def _predict_text(facts: Any, args: argparse.Namespace) -> int:
    from tunesmith.errors import ConfigError

    texts, pairs = args.text, args.text_pair
    if facts.rendered:
        problem = f"the model reads the columns {', '.join(facts.text_columns)}, not one text"
        raise ConfigError(problem, fix="Use --input FILE; --input - reads csv or JSON lines from stdin.")
    wanted = len(facts.text_columns) if facts.text_columns is not None else (1 if pairs is None else 2)
    if wanted == 2 and pairs is None and len(texts) == 2:
        texts, pairs = texts[:1], texts[1:]
    if (wanted == 2) != (pairs is not None) or (pairs is not None and len(pairs) != len(texts)):
        kind = "text pairs" if wanted == 2 else "single texts"
        raise ConfigError(
            f"this model expects {kind}, got --text with {len(texts)} and --text_pair with {len(pairs or ())} texts",
            fix="Quote each text; pass pairs as --text A ... --text_pair B ...",
        )
    if not args.allow_empty_text and not all(text.strip() for text in (*texts, *(pairs or ()))):
        raise ConfigError("--text is empty", fix="Pass a text, or set --allow_empty_text.")
    # A GPU takes longer to start than a CPU needs for a few texts.
    args.use_cpu = args.use_cpu or (len(texts) <= FEW_TEXTS and not args.bf16)
    predictor = load_predictor(args)
    from tunesmith.inference.tables import make_predictions

    found = make_predictions(predictor.probabilities(texts, pairs), predictor.facts.labels)
    for number, one in enumerate(found):
        shown = texts[number] if pairs is None else f"{texts[number]} | {pairs[number]}"
        label = (
            one.label
            if one.answered is not False
            else f"{one.label} (not answered: below the threshold of --max_error)"
        )
        print(f"{shown}: {label}" if len(texts) > 1 else label)
        for label, value in one.best(args.top_k):
            print(f"  {label}  {value:.4f}")
    return 0


def _predict_file(facts: Any, args: argparse.Namespace) -> int:
    from tunesmith.cli.console import Console
    from tunesmith.inference.bulk import label_columns
    from tunesmith.inference.tables import (
        check_cells,
        describe_renaming,
        list_answers,
        write_delimited,
        write_table,
    )

    console = Console()
    output = None if args.output is None else Path(args.output)
    columns, text = _read_columns(facts, args, console)
    check_cells(output, columns)
    predictor = load_predictor(args)
    predict = partial(predict_on_console, predictor, console=console, max_rows=args.batch_size, what="predicting")
    given = list(columns)
    columns = label_columns(
        predictor, columns, text, args.top_k, allow_empty=args.allow_empty_text, predict_logits=predict
    )
    renamed = describe_renaming(list_answers(predictor.facts.labels, args.top_k), list(columns)[len(given) :])
    if renamed is not None:
        console.say(renamed)
    if output is not None:
        write_table(output, columns)
        print(f"{output}: {len(next(iter(columns.values()))):,} rows", file=sys.stderr)
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):  # data is UTF-8 as in files, whatever the locale is
        sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    write_delimited(sys.stdout, columns, ",")
    return 0


def _read_columns(facts: Any, args: argparse.Namespace, console: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return all columns of the input and the names of the text columns."""
    from tunesmith.inference.model_folder import is_graph_folder

    reading = Reading.of(args)
    if is_graph_folder(Path(args.run)):  # an exported model: only the packages that it needs
        from tunesmith.inference.bulk import read_whole

        text = chosen_names(args, facts) or ("text",)
        return read_whole(args.input, reading), tuple(text)
    from tunesmith.data.read import read_unlabeled
    from tunesmith.data.rows import input_columns
    from tunesmith.data.text_files import read_stdin

    source: Any = Path(args.input)
    if args.input == "-":
        source = read_stdin(reading)
    text = text_columns(args, facts, source)
    found = read_unlabeled(source, text=text, reading=reading, on_progress=partial(console.progress, "reading"))
    added = set(input_columns(text)) - set(text)
    return {name: found.dataset[name][:] for name in found.column_names if name not in added}, text


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
    text = chosen_names(args, facts)
    if not text:
        raise ConfigError("the text columns of this model are not known", fix="Set --text_column_names.")
    output = Path(args.output)
    job = BulkJob(find_inputs(args.input), output, tuple(text), args.top_k, Reading.of(args), args.bf16)
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


# Shared with `evaluate`


READING = {
    "--text_column_names NAME...": "Text column, or two for text pairs. Default: as in training.",
    "--encoding NAME": "Text encoding of the file. Default: utf-8.",
    "--delimiter CHAR": "Column separator. Default: by file type.",
    "--quoting minimal|none": "How quotes are read. Default: minimal for csv, none for tsv.",
    "--sheet_name NAME": "Sheet of a spreadsheet. Default: the one that contains a table.",
    "--allow_empty_text": "Accept rows with empty text.",
    "--batch_size ROWS": "Maximum number of examples per batch. Default: by device.",
    "--use_cpu": "Use the CPU even if there is a GPU.",
    "--bf16": "Compute in bfloat16.",
}
"""Flags for reading a file and running the model."""


def read_model_facts(args: argparse.Namespace) -> Any:
    """Return the facts of the model of `args.run`. Needs no torch, so that a wrong file is refused before the model is loaded."""
    from tunesmith.cli.console import quiet_libraries
    from tunesmith.inference.model_folder import model_folder_of, read_facts

    quiet_libraries()
    folder = model_folder_of(args.run).folder
    return read_facts(folder)


def load_predictor(args: argparse.Namespace) -> Any:
    """Load the trained model of `args.run`."""
    from tunesmith.inference.predictor import Predictor

    predictor = Predictor.load(args.run, use_cpu=args.use_cpu, precision="bf16" if args.bf16 else "no")
    max_error = getattr(args, "max_error", None)
    if max_error is None:
        return predictor
    if args.calibration_file is not None:
        predictor = _calibrate(predictor, args)
    predictor = predictor.abstaining(max_error, per_class=args.max_error_per_class)
    print(predictor.facts.labels.abstention.line(), file=sys.stderr)
    return predictor


def _calibrate(predictor: Any, args: argparse.Namespace) -> Any:
    """Read the labeled examples of --calibration_file, on which thresholds are chosen."""
    file, facts = args.calibration_file, predictor.facts
    text = text_columns(args, facts, file)
    found = facts.read_labeled(Path(file), text, args.label_column_name, reading=Reading.of(args))
    return predictor.with_calibration(*found)


def chosen_names(args: argparse.Namespace, facts: Any) -> tuple[str, ...]:
    """Return the text columns: those of --text_column_names, else those of training; none if both are unknown."""
    from tunesmith.errors import ConfigError

    names = tuple(name.strip() for given in args.text_column_names or () for name in given.split(","))
    trained = tuple(facts.text_columns or ())
    if len(set(names)) < len(names) or not all(names):
        raise ConfigError(f"--text_column_names {','.join(names)}: a name is empty or occurs twice")
    if names and (facts.rendered or len(names) > 2) and set(names) != set(trained):
        known = (
            f"the columns {', '.join(trained)}, which are rendered with their names" if trained else "one text, or two"
        )
        fix = "Omit --text_column_names, and rename the columns of the file if they differ."
        raise ConfigError(f"the model reads {known}", fix=fix)
    return trained if facts.rendered else names or trained


def text_columns(args: argparse.Namespace, facts: Any, file: Any) -> tuple[str, ...]:
    """Return the text columns: as requested, else as in training, else as detected in the file."""
    from tunesmith.data.columns import infer_columns
    from tunesmith.data.read import read_source

    names = chosen_names(args, facts)
    if names:
        return names
    return infer_columns({"train": read_source(file, name="train", reading=Reading.of(args))}).text


def predict_on_console(predictor: Any, texts: list[list[str]], console: Any, *, max_rows: int | None, what: str) -> Any:
    """Return the logits of texts, one list per text column; truncated and empty texts are reported."""
    from tunesmith.data.tokenize import describe_empty
    from tunesmith.pipeline.train import make_counter

    counter = make_counter(console.progress, what, len(texts[0]))
    found = predictor.predict_texts(texts, max_rows=max_rows, on_batch=counter)
    if found.truncated.rows_cut:
        console.say(found.truncated.sentence("input"))
    if found.empty:
        console.say(describe_empty("input", found.empty))
    console.close()
    return found.logits
