"""Write a commented config for a data file, with the columns and the task found in it and the options that are changed most."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tunesmith.cli.parser import add_flag, add_option_flags, user_path
from tunesmith.config.load import load_config
from tunesmith.config.schema import RunConfig, dump_value, list_options
from tunesmith.errors import ConfigError
from tunesmith.labels import Task
from tunesmith.runs.folder import require_not_of_a_run
from tunesmith.runs.writing import require_plain, write_file

USUAL = (
    *("train_file", "validation_file", "test_file", "validation_split_fraction", "text_column_names"),
    *("label_column_name", "do_regression", "max_seq_length", "model_name_or_path", "num_train_epochs"),
    *("per_device_train_batch_size", "learning_rate", "warmup_steps", "weight_decay", "seed", "eval_strategy"),
    *("metric_for_best_model", "early_stopping_patience", "bf16", "output_dir"),
)
"""The options most people change. They come first; the others follow as comments."""
READING = (
    *("text_column_names", "label_column_name", "label_separator", "label_names", "do_regression"),
    *("merge_label_variants", "split_column_name"),
    *("encoding", "delimiter", "quoting", "sheet_name"),
)
"""The options of train that say how a file is read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The data file and where to write."""
    add_flag(parser, "train_file data.csv", "Training rows: csv, tsv, jsonl, parquet or arrow.", type=user_path)
    add_flag(parser, "-o --output FILE", "Config to write. [run.yaml]", default="run.yaml")
    add_flag(parser, "--validation_file FILE", "Rows to evaluate on while training.")
    add_flag(parser, "--test_file FILE", "Rows to evaluate or predict at the end.")
    add_option_flags(parser, "Columns and reading, as in train", READING)
    add_flag(parser, "--force", "Overwrite the config when it exists.")


def run(args: argparse.Namespace) -> int:
    """Writes the file and says what was found."""
    output = Path(args.output)
    if output.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError("the config is written as YAML", where=str(output), fix="Give a name that ends in .yaml")
    if output.exists() and not args.force:
        raise ConfigError("exists already", where=str(output), fix="Use --force to overwrite it, or -o OTHER.yaml")
    require_plain(output)
    require_not_of_a_run(output)
    files = {
        name: getattr(args, name) for name in ("train_file", "validation_file", "test_file") if getattr(args, name)
    }
    asked = load_config(None, args.given, need_data=False)
    found, why = look_at(files, {name: getattr(asked, name) for name in READING})
    config = load_config(None, {**files, **args.given, **found})
    write_file(output, describe_run(config, why).encode())
    for sentence in why:
        print(sentence)
    print(f"Wrote {output}. Train with: tunesmith train {output}")
    return 0


def look_at(files: dict[str, str], asked: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Columns and task of the files as options, and the sentences that say why."""
    from tunesmith.data.columns import infer_columns
    from tunesmith.data.read import read_source
    from tunesmith.data.split import follow_split_column

    how = {name: asked[name] for name in ("encoding", "delimiter", "quoting", "sheet_name")}
    sources = {
        name.removesuffix("_file"): read_source(path, name=name.removesuffix("_file"), **how)
        for name, path in files.items()
    }
    wanted = ("text_column_names", "label_column_name", "label_separator", "do_regression", "merge_label_variants")
    notes: list[str] = []
    sources = follow_split_column(sources, asked["split_column_name"], notes)
    columns = infer_columns(sources, **{name: asked[name] for name in wanted})
    found: dict[str, Any] = {"text_column_names": list(columns.text), "do_regression": columns.task is Task.REGRESSION}
    if columns.label is not None:
        found["label_column_name"] = columns.label
    rows = ", ".join(f"{len(source.dataset):,} {name} rows" for name, source in sources.items())
    return found, (f"{rows}; the task is {columns.task.value}.", *columns.why, *notes)


def describe_run(config: RunConfig, why: tuple[str, ...]) -> str:
    """The config file: what was found, the usual options, then every other option as a comment."""
    lines = [
        f"# {sentence}" for sentence in ("Run config for tunesmith. Train with: tunesmith train <this file>", *why)
    ]
    options = list_options()
    for name in USUAL:
        lines += ["", f"# {options[name].help}", f"{name}: {dump_value(getattr(config, name))}"]
    lines += ["", "# Everything else, with its default. Remove the # in front of a name to change it."]
    for option in options.values():
        if option.name not in USUAL:
            value = getattr(config, option.name)
            mark = "#" if value == option.default else ""  # a flag that was given stays in force
            lines += ["#", f"# {option.help}", f"{mark}{option.name}: {dump_value(value)}"]
    return "\n".join(lines) + "\n"
