"""What `evaluate` and `predict` share: how a file is read and brought into a trained model."""

from __future__ import annotations

import argparse
from typing import Any


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags about reading a file and running the model."""
    parser.add_argument("--encoding", metavar="NAME", help="text encoding of the file; default: utf-8")
    parser.add_argument("--delimiter", metavar="CHAR", help="column separator; default: by file type")
    parser.add_argument(
        "--quoting", choices=("minimal", "none"), help="quotes in the file; default: csv minimal, tsv none"
    )
    parser.add_argument("--allow_empty_text", action="store_true", help="rows with an empty text are fine")
    parser.add_argument(
        "--batch_size", type=_positive, metavar="ROWS", help="rows at once at the most; default: what suits the device"
    )
    parser.add_argument("--use_cpu", action="store_true", help="do not use a GPU")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of rows")
    return value


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for the reader."""
    return {
        "encoding": args.encoding,
        "delimiter": args.delimiter,
        "quoting": args.quoting,
        "allow_empty_text": args.allow_empty_text,
    }


def read_model_facts(args: argparse.Namespace) -> Any:
    """What the model of `args.run` says about itself. Needs no torch: a wrong file is told before the model loads."""
    from tunesmith.cli.console import quiet_libraries
    from tunesmith.model.config_file import read_config
    from tunesmith.predict.facts import model_folder_of, read_facts

    quiet_libraries()
    folder = model_folder_of(args.run).folder
    return read_facts(folder, read_config(folder))


def load_predictor(args: argparse.Namespace) -> Any:
    """The trained model of `args.run`."""
    from tunesmith.predict.predictor import Predictor

    return Predictor.load(args.run, use_cpu=args.use_cpu, precision="bf16" if args.bf16 else "no")


def text_columns(args: argparse.Namespace, facts: Any, file: str) -> tuple[str, ...]:
    """The text columns: as asked for, else as in training, else as found in the file."""
    from tunesmith.data.columns import infer_columns, split_names
    from tunesmith.data.read import read_source

    asked = split_names(args.text_column_names)
    if asked:
        return asked
    if facts.text_columns is not None:
        return tuple(facts.text_columns)
    options = {k: v for k, v in reading_options(args).items() if k != "allow_empty_text"}
    return infer_columns({"train": read_source(file, name="train", **options)}).text


def tokenize_rows(dataset: Any, predictor: Any, text: tuple[str, ...], console: Any) -> Any:
    """Token rows of the file; how many texts were cut is reported."""
    from tunesmith.data.tokenize import tokenize
    from tunesmith.data.truncation import describe_empty

    predictor.require_segments(len(text))
    tokenized = tokenize(
        dataset,
        predictor.tokenizer,
        text,
        max_length=predictor.max_length,
        vocab_size=predictor.model.get_input_embeddings().num_embeddings,
        on_progress=lambda done, total: console.progress("tokenizing", done, total),
    )
    if tokenized.truncated.rows_cut:
        console.say(tokenized.truncated.sentence("input"))
    if tokenized.empty:
        console.say(describe_empty("input", tokenized.empty))
    return tokenized.rows
