"""Score a trained model on labeled data, with 95% intervals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tunesmith.cli.parser import MODEL, add_flags, user_path
from tunesmith.cli.predict import (
    READING,
    load_predictor,
    predict_on_console,
    read_model_facts,
    text_columns,
)
from tunesmith.config.options import Reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    text = "Labeled data: csv, tsv, jsonl, xlsx, parquet or arrow."
    parser.add_argument("--test_file", required=True, type=user_path, metavar="FILE", help=text)
    flags = {
        "--label_column_name NAME": "Label column. Default: as in training.",
        "--merge_label_variants": "Accept labels that differ from the model's only in case or spaces.",
        "--metric_name NAMES": "Metrics, separated by commas. Default: by task.",
        "--json": "Print JSON.",
    }
    add_flags(parser, MODEL | flags | READING)


def run(args: argparse.Namespace) -> int:
    """Print the scores and return the exit code."""
    from tunesmith.cli.console import Console
    from tunesmith.errors import DataError

    console = Console()
    facts = read_model_facts(args)
    texts, labels = facts.read_labeled(
        Path(args.test_file),
        text_columns(args, facts, args.test_file),
        args.label_column_name,
        reading=Reading.of(args),
        merge_label_variants=args.merge_label_variants,
    )
    suite = facts.suite(args.metric_name.split(",") if args.metric_name else None)
    predictor = load_predictor(args)
    logits = predict_on_console(predictor, texts, console, max_rows=args.batch_size, what="evaluating")
    scores = suite.compute_with_intervals(logits, labels)
    if next(iter(scores.values())).n == 0:
        raise DataError("contains no labeled row", where=args.test_file)
    if args.json:
        print(json.dumps({name: score.to_json() for name, score in scores.items()}, indent=1))
        return 0
    width = max(len(score.title(name)) for name, score in scores.items())
    for name, score in scores.items():
        print(f"{score.title(name):<{width}}  {score.text()}")
    return 0
