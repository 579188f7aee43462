"""The options of RunConfig as command-line flags, made from the schema: name, type, default and help stand there only."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from tunesmith.cli.parser import Switch, user_path
from tunesmith.config.convert import choices_of, is_boolean, is_list
from tunesmith.config.load import IGNORED, REFUSED, RENAMED, load_config
from tunesmith.config.schema import Option, RunConfig, dump_value, list_options
from tunesmith.errors import ConfigError

MOST_USED = (
    *("train_file", "validation_file", "test_file", "text_column_names", "label_column_name", "model_name_or_path"),
    *("output_dir", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "max_seq_length", "seed"),
)
"""What `train --help` begins with; the other options follow in their sections."""


def add_config_arguments(
    parser: argparse.ArgumentParser, groups: Iterable[str] | None = None, *, positional: bool = False
) -> None:
    """Adds --config and a flag for each option of the named sections (all of them by default).

    Only flags really given are kept, in `args.given`. `positional` lets a bare `run.yaml` stand for `--config run.yaml`.
    """
    wanted = None if groups is None else set(groups)
    parser.set_defaults(given={})
    parser._optionals.title = "options used most" if wanted is None else "options"
    parser.epilog = (
        "A switch stands alone or takes true or false: --bf16, --bf16 false and --no_bf16 all work. [x]: default x."
    )
    parser.add_argument(
        "--config", type=user_path, metavar="FILE", help="Read options from a .yaml, .json or .toml file."
    )
    if positional:
        parser.add_argument(
            "config_file", nargs="?", type=user_path, metavar="run.yaml", help="The same as --config run.yaml."
        )
    sections: dict[str, Any] = {}
    first = MOST_USED if wanted is None else ()
    for name in first:
        _add_option(parser, list_options()[name])
    for option in list_options().values():
        if option.name not in first and (wanted is None or option.group in wanted):
            section = sections.get(option.group) or parser.add_argument_group(option.group)
            sections[option.group] = section
            _add_option(section, option)
    if wanted is None:
        _add_old_names(parser)


def add_option_flags(parser: argparse.ArgumentParser, title: str, names: Iterable[str]) -> None:
    """Adds the flags of some options; what is given is kept in `args.given`."""
    parser.set_defaults(given={})
    section = parser.add_argument_group(title)
    for name in names:
        _add_option(section, list_options()[name])


def config_from_args(args: argparse.Namespace) -> RunConfig:
    """The config of a parsed command line: flags over the file over the defaults."""
    file, bare = args.config, getattr(args, "config_file", None)
    if file is not None and bare is not None:
        raise ConfigError(f"two config files are given: {file} and {bare}", fix="Give one")
    return load_config(file if file is not None else bare, args.given)


class _Give(argparse.Action):
    """Keeps the text of a flag in `args.given`; several values are a list, a list of one may hold commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if isinstance(values, list):
            values = values[0] if len(values) == 1 else values
        namespace.given = {**namespace.given, self.dest: values}


class _GiveSwitch(_Give, Switch):
    """`--bf16`, `--bf16 true`, `--bf16 false`."""


class _GiveNo(argparse.Action):
    """`--no_bf16` is `--bf16 false`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.given = {**namespace.given, self.dest: "false"}


def _add_option(section: Any, option: Option) -> None:
    text = f"{option.help}{_default_text(option)}".replace("%", "%%")
    flag = f"--{option.name}"
    if is_boolean(option.hint):
        section.add_argument(flag, action=_GiveSwitch, help=text)
        section.add_argument(f"--no_{option.name}", dest=option.name, action=_GiveNo, nargs=0, help=argparse.SUPPRESS)
        return
    if option.name in ("resume_from_checkpoint", "fsdp"):
        metavar = "NAME" if option.name == "fsdp" else "FOLDER"
        section.add_argument(flag, action=_Give, nargs="?", const="true", metavar=metavar, help=text)
        return
    nargs = "+" if is_list(option.hint) else None
    section.add_argument(flag, action=_Give, nargs=nargs, metavar=_metavar(option), help=text)


def _add_old_names(parser: argparse.ArgumentParser) -> None:
    """Flags of earlier versions: accepted, not shown. The loader says what became of them."""
    switches = ("group_by_length", "no_cuda", "overwrite_output_dir", "trust_remote_code", "push_to_hub")
    for name in (*RENAMED, *IGNORED, *REFUSED):
        is_switch = name in switches or name.startswith("do_") or name in ("remove_unused_columns",)
        action = _GiveSwitch if is_switch else _Give
        parser.add_argument(f"--{name}", action=action, help=argparse.SUPPRESS)


def _metavar(option: Option) -> str:
    choices = choices_of(option.hint)
    if choices and not is_list(option.hint) and len("|".join(choices)) <= 30:
        return "|".join(choices)
    if option.name.endswith("_file"):
        return "FILE"
    if option.name.endswith("_dir"):
        return "FOLDER"
    text = str(option.hint)
    if "dict" in text:
        return "JSON"
    if "float" in text:
        return "X"
    return "NAME" if "str" in text or choices else "N"


def _default_text(option: Option) -> str:
    choices = choices_of(option.hint)
    listed = f" One of: {', '.join(choices)}." if len("|".join(choices)) > 30 else ""
    if option.default is None or option.default in ((), {}) or "Default:" in option.help:
        return listed
    default = option.default
    shown = default if isinstance(default, str) else ", ".join(default) if isinstance(default, tuple) else None
    return f"{listed} [{shown if shown is not None else dump_value(default)}]"
