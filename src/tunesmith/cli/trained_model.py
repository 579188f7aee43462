"""Shared by `evaluate` and `predict`: read a file and run a trained model on it."""

from __future__ import annotations

import argparse
from typing import Any

from tunesmith.cli.parser import add_flag


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model as the first argument."""
    what = "Run folder, or any folder with a trained classifier."
    add_flag(parser, "run RUN", what)


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for reading a file and running the model."""
    columns = "Text column, or two for text pairs. Default: as in training."
    add_flag(parser, "--text_column_names NAME", columns, nargs="+")
    add_flag(parser, "--encoding NAME", "Text encoding of the file. Default: utf-8.")
    add_flag(parser, "--delimiter CHAR", "Column separator. Default: by file type.")
    add_flag(
        parser, "--quoting", "How quotes are read. Default: minimal for csv, none for tsv.", choices=("minimal", "none")
    )
    add_flag(parser, "--sheet_name NAME", "Sheet of a spreadsheet. Default: the one that contains a table.")
    add_flag(parser, "--allow_empty_text", "Accept rows with empty text.")
    add_flag(parser, "--batch_size ROWS", "Maximum number of examples per batch. Default: by device.", type=positive)
    add_flag(parser, "--use_cpu", "Use the CPU even if there is a GPU.")
    add_flag(parser, "--bf16", "Compute in bfloat16.")


def positive(text: str) -> int:
    """Parse a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return value


def raise_on_sigterm() -> None:
    """Let SIGTERM raise StoppedBySignal, so that temporary files are removed."""
    import signal
    import threading

    from tunesmith.errors import StoppedBySignal

    def stop(number: int, frame: object) -> None:
        raise StoppedBySignal(number, "nothing was written")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for the reader."""
    return {
        "encoding": args.encoding,
        "delimiter": args.delimiter,
        "quoting": args.quoting,
        "allow_empty_text": args.allow_empty_text,
        **({"sheet_name": args.sheet_name} if args.sheet_name is not None else {}),
    }


def read_model_facts(args: argparse.Namespace) -> Any:
    """The facts of the model of `args.run`. Needs no torch, so that a wrong file is refused before the model is loaded."""
    from tunesmith.cli.console import quiet_libraries
    from tunesmith.inference.model_folder import model_folder_of, read_facts
    from tunesmith.models.files import read_config_file

    quiet_libraries()
    folder = model_folder_of(args.run).folder
    return read_facts(folder, read_config_file(folder))


def load_predictor(args: argparse.Namespace, *, threads: int | None = None) -> Any:
    """The trained model of `args.run`; `threads` are those of a CPU."""
    from tunesmith.inference.predictor import Predictor

    return Predictor.load(args.run, use_cpu=args.use_cpu, precision="bf16" if args.bf16 else "no", threads=threads)


def chosen_names(args: argparse.Namespace) -> tuple[str, ...]:
    """The text columns that --text_column_names names; none without it."""
    from tunesmith.data.columns import split_names

    given = args.text_column_names
    return split_names(given[0] if isinstance(given, list) and len(given) == 1 else given)


def text_columns(args: argparse.Namespace, facts: Any, file: Any) -> tuple[str, ...]:
    """The text columns: as requested, else as in training, else as found in the file."""
    from tunesmith.data.columns import infer_columns
    from tunesmith.data.read import read_source

    asked = chosen_names(args)
    if asked:
        return asked
    if facts.text_columns is not None:
        return tuple(facts.text_columns)
    options = {k: v for k, v in reading_options(args).items() if k != "allow_empty_text"}
    return infer_columns({"train": read_source(file, name="train", **options)}).text


def predict_dataset(
    predictor: Any, dataset: Any, text: tuple[str, ...], console: Any, *, max_rows: int | None, what: str
) -> Any:
    """Logits of every row of a Dataset; cut and empty texts are reported."""
    from tunesmith.data.tokenize import describe_empty
    from tunesmith.inference.predictor import chunks_of_dataset

    counter = console.counter(what, len(dataset))
    found = predictor.predict_texts(chunks_of_dataset(dataset, text), max_rows=max_rows, on_batch=counter)
    if found.truncated.rows_cut:
        console.say(found.truncated.sentence("input"))
    if found.empty:
        console.say(describe_empty("input", found.empty))
    console.close()
    return found.logits
