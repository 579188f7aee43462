"""`tunesmith audit RUN --unlabeled FILE --next N`: print and write the examples to label next."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.cli.parser import add_flags
from tunesmith.config.load import load_config
from tunesmith.config.options import Reading
from tunesmith.errors import ConfigError

if TYPE_CHECKING:
    from tunesmith.pipeline.label_next import NextLabels

WIDTH = 70
"""Characters of a text that are printed."""


def add_next_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose examples to label."""
    group = parser.add_argument_group("Choose what to label next (pass the folder of a finished run instead of files)")
    flags = {
        "--unlabeled FILE": "Examples without labels.",
        "--next N": "Number of examples to choose. Default: 50.",
        "--output FILE": "Write them to a .csv, .tsv, .jsonl, .parquet or .json file.",
        "--output_tool label_studio|argilla": "Annotation tool that reads the .json file. Default: label_studio.",
    }
    add_flags(group, flags)


def run_next(args: argparse.Namespace) -> int:
    """Print the examples to label next and the forecast, write --output, and return the exit code."""
    from tunesmith.cli.console import Console, quiet_libraries
    from tunesmith.files import require_plain
    from tunesmith.inference.tables import check_format
    from tunesmith.pipeline.label_next import label_next
    from tunesmith.runs.folder import require_not_of_a_run

    if args.unlabeled is None:
        raise ConfigError("--next, --output and --output_tool require --unlabeled FILE")
    if len(args.files) != 1:
        raise ConfigError("--unlabeled requires the folder of a finished run", fix="Run: tunesmith audit RUN ...")
    output = None if args.output is None else Path(args.output)
    if output is not None:
        if output.suffix != ".json":
            check_format(output)
        require_plain(output)
        require_not_of_a_run(output)
    if args.output_tool is not None and (output is None or output.suffix != ".json"):
        raise ConfigError("--output_tool requires --output with a name that ends in .json")
    quiet_libraries()
    console = Console()
    reading = Reading.of(load_config(args.config, args.given, need_data=False))
    try:
        found = label_next(args.files[0], args.unlabeled, args.next or 50, reading, console.observer())
    finally:
        console.close()
    if output is not None:
        write_next(output, found, args.output_tool or "label_studio")
        print(f"{output}: {len(found.examples)} examples", file=sys.stderr)
    if args.json:
        forecasts = [vars(one) for one in found.forecasts]
        shown = {"examples": [vars(one) for one in found.examples], "duplicates": found.duplicates}
        print(json.dumps({**shown, "forecasts": forecasts}, indent=1, ensure_ascii=False, default=str))
    else:
        print("\n".join(describe_next(found)))
    return 0


def describe_next(found: NextLabels) -> list[str]:
    """Return one line per example, then the forecast."""
    lines = []
    for one in found.examples:
        text = " ".join(" | ".join(str(one.columns[name]) for name in found.facts.text_columns or ()).split())
        shown = text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
        lines.append(f"{one.place}  {one.label} {one.probability:.2f}  {shown}")
    lines.append("")
    if found.duplicates:
        plural = "" if found.duplicates == 1 else "s"
        lines.append(f"Skipped: {found.duplicates:,} near-duplicate{plural} of training texts.")
    lines += [f"Forecast: {one.line()}." for one in found.forecasts]
    if found.forecasts:
        lines.append("Forecasts are for random examples and a linear probe, with 90% intervals.")
    else:
        lines.append("Forecast: none, because there are too few labeled training examples.")
    return lines


def write_next(output: Path, found: NextLabels, tool: str) -> None:
    """Write the examples with all their columns, the prediction and its probability."""
    from tunesmith.files import make_folder, write_file
    from tunesmith.inference.tables import choose_column_names, write_table

    names = list(found.examples[0].columns) if found.examples else []
    if output.suffix != ".json":
        table: dict[str, list[Any]] = {name: [one.columns[name] for one in found.examples] for name in names}
        prediction, probability = choose_column_names(("prediction", "probability"), names)
        table[prediction] = [one.label for one in found.examples]
        table[probability] = [one.probability for one in found.examples]
        write_table(output, table)
        return
    label = found.facts.label_column or "label"
    if "," in label:  # columns of probabilities
        label = "label"
    text = (found.facts.text_columns or ("text",))[0]
    records: list[object] = []
    for one in found.examples:
        if tool == "argilla":
            suggestion = {"value": one.label, "score": one.probability}
            records.append({"fields": one.columns, "responses": {}, "suggestions": {label: suggestion}})
        else:
            choice = {"from_name": label, "to_name": text, "type": "choices", "value": {"choices": [one.label]}}
            predictions = [{"score": one.probability, "result": [choice]}]
            records.append({"data": one.columns, "annotations": [], "predictions": predictions})
    make_folder(output.parent)
    write_file(output, json.dumps(records, indent=1, ensure_ascii=False, default=str).encode())
