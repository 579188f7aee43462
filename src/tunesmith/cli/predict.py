"""`tunesmith predict RUN --input x.csv --output y.csv`: labels and probabilities for new rows, in input order."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.cli.parser import user_path
from tunesmith.cli.reading import (
    add_reading_arguments,
    load_predictor,
    read_model_facts,
    reading_options,
    text_columns,
)
from tunesmith.cli.streams import print_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument(
        "run", type=user_path, metavar="RUN", help="run folder, or any folder with a trained classifier"
    )
    parser.add_argument(
        "--input", type=user_path, metavar="FILE", help="rows to label: csv, tsv, jsonl, parquet or arrow"
    )
    parser.add_argument(
        "--output",
        type=user_path,
        metavar="FILE",
        help="where to write: .csv, .tsv, .jsonl or .parquet; default: stdout as csv",
    )
    parser.add_argument(
        "--text", nargs="+", metavar="TEXT", help="classify one text, or two that form a pair, and print the result"
    )
    parser.add_argument(
        "--text_column_names", metavar="NAMES", help="one text column or two, with a comma; default: as in training"
    )
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Predicts and writes the table; gives the exit code."""
    from tunesmith.errors import ConfigError
    from tunesmith.predict.tables import check_format
    from tunesmith.run.claim import require_not_of_a_run
    from tunesmith.run.writing import require_plain

    if (args.input is None) == (args.text is None):
        raise ConfigError("give either --input FILE or --text")
    if args.output is not None:
        check_format(Path(args.output))
        require_plain(Path(args.output))
        require_not_of_a_run(Path(args.output))
        if args.input is not None and Path(args.output).resolve() == Path(args.input).resolve():
            raise ConfigError("is the input file", where=args.output, fix="Give another --output.")
    facts = read_model_facts(args)
    return _predict_file(facts, args) if args.text is None else _predict_text(facts, args)


def _predict_text(facts: Any, args: argparse.Namespace) -> int:
    from tunesmith.errors import ConfigError

    texts = args.text
    wanted = len(facts.text_columns or texts[:2])
    if len(texts) != wanted:
        raise ConfigError(f"this model reads {wanted} text(s), {len(texts)} given", fix="Put each text in quotes.")
    predictor = load_predictor(args)
    from tunesmith.predict.predictor import predicted_names

    probabilities = predictor.probabilities(texts[:1], texts[1:2] or None)
    print(predicted_names(probabilities, predictor.facts.labels)[0])
    for name, value in zip(predictor.facts.labels.names, probabilities[0], strict=True):
        print(f"  {name}  {value:.4f}")
    return 0


def _predict_file(facts: Any, args: argparse.Namespace) -> int:
    from tunesmith.cli.console import Console
    from tunesmith.data.load import read_unlabelled
    from tunesmith.data.truncation import describe_empty
    from tunesmith.predict.column_names import choose_names, describe_renaming, list_answers
    from tunesmith.predict.tables import check_cells, write_delimited, write_table

    console = Console()
    text = text_columns(args, facts, args.input)
    reading = partial(console.progress, "reading")
    source = read_unlabelled(Path(args.input), text=text, on_progress=reading, **reading_options(args))
    output = None if args.output is None else Path(args.output)
    check_cells(output, {name: source.dataset[name] for name in source.column_names})
    ours = list_answers(facts.labels)
    names = choose_names(ours, source.column_names)
    renamed = describe_renaming(ours, names)
    if renamed is not None:
        console.say(renamed)
    predictor = load_predictor(args)
    from tunesmith.predict.predictor import predicted_names, probabilities_of
    from tunesmith.predict.stream import chunks_of_dataset

    count = len(source.dataset)
    chunks = chunks_of_dataset(source.dataset, text)
    found = predictor.predict_texts(chunks, max_rows=args.batch_size, on_batch=console.counter("predicting", count))
    if found.truncated.rows_cut:
        console.say(found.truncated.sentence("input"))
    if found.empty:
        console.say(describe_empty("input", found.empty))
    console.close()
    logits = found.logits
    labels = predictor.facts.labels
    probabilities = probabilities_of(logits, labels.task)
    columns: dict[str, Any] = {name: source.dataset[name][:] for name in source.column_names}
    answers = [predicted_names(probabilities, labels), *probabilities.T.tolist()]
    columns |= dict(zip(names, answers, strict=False))  # a regression has no probabilities
    if output is None:
        write_delimited(print_data(sys.stdout), columns, ",")
        return 0
    write_table(output, columns)
    print(f"{args.output}: {count:,} rows", file=sys.stderr)
    return 0
