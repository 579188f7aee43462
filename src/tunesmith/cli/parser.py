"""Command-line parsing: argparse with dashes or underscores in flags, switches with an optional value, and suggestions for
misspelled names. The flags of a run are made from the options table in config/options.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from tunesmith.config.load import IGNORED, REFUSED, RENAMED, WORDS, load_config, raise_problems, suggest
from tunesmith.config.options import Option, RunConfig, dump_value, list_options
from tunesmith.errors import ConfigError


def user_path(text: str) -> str:
    """Return a path with `~` replaced by the home folder, which the shell doesn't do in `--output=~/x`."""
    return os.path.expanduser(text)


def positive(text: str) -> int:
    """Parse a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return value


TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("FILE", "FOLDER", "RUN", "RUNS_DIR"), user_path),
    **dict.fromkeys(("N", "K", "ROWS"), positive),
    "PORT": int,
    "RATE": float,
    "X": float,
}
"""Name of a value in the help -> its type; text by default."""
MODEL = {"run RUN": "Run folder, or any folder with a trained classifier."}
"""The first argument of commands that use a model."""


def add_flags(parser: Any, flags: Mapping[str, str], **defaults: Any) -> None:
    """Add arguments as the help shows them, with their help: `--output FILE`, `--json` (a switch) or `run RUN` (positional).

    `--to a|b` accepts one of these values, `--text TEXT...` several, and `run RUN?` or `files FILE*` may be omitted.
    """
    for words, text in flags.items():
        parts = words.split()
        names = [part for part in parts if part.startswith("-")] or parts[:1]
        value = " ".join(parts[len(names) :])
        kind = value.rstrip(".?*")
        options: dict[str, Any] = {"metavar": kind, "type": TYPES.get(kind, str)}
        if not value:
            options = {"action": "store_true"}
        elif "|" in value:
            options = {"choices": value.split("|")}
        elif kind != value:
            options["nargs"] = {"...": "+"}.get(value.removeprefix(kind), value[-1])
        parser.add_argument(*names, help=text, **options)
    parser.set_defaults(**defaults)


class Switch(argparse.Action):
    """A flag without a value (`--bf16`), or followed by true or false. Subclasses store the value."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, and reports all unknown flags together with other problems."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=HelpFormatter, **options)
        self.add_argument("-h", "--help", action="help", help="Show this help.")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments. Flags and file names may come in any order."""
        args, extra = self.parse_known_intermixed_args(self.spell(argv))
        unknown = [word for word in extra if word.startswith("-") and word != "-"]
        if unknown:
            raise_problems([*map(self._unknown_flag, unknown), *_other_problems(args)])
        if extra:
            raise ConfigError(f"unexpected argument {extra[0]!r}", fix=f"See `{self.prog} --help`")
        return args

    def spell(self, argv: Sequence[str]) -> list[str]:
        """Return the arguments with registered spelling, and switches without a value as `--flag=true`."""
        registered = {_plain(name): name for name in self._option_string_actions if name.startswith("--")}
        words: list[str] = []
        for at, word in enumerate(argv):
            if word == "--":
                return words + list(argv[at:])
            name, equals, value = word.partition("=")
            known = registered.get(_plain(name)) if word.startswith("--") else None
            if known is None:
                words.append(word)
                continue
            following = argv[at + 1].lower() if at + 1 < len(argv) else ""
            if isinstance(self._option_string_actions[known], Switch) and not equals and following not in WORDS:
                equals, value = "=", "true"
            words.append(f"{known}{equals}{value}")
        return words

    def error(self, message: str) -> NoReturn:
        """Raise a usage problem as a ConfigError: one line, exit code 2."""
        raise ConfigError(message, fix=f"See `{self.prog} --help`")

    def _unknown_flag(self, word: str) -> str:
        name = word.partition("=")[0]
        known = tuple(flag[2:] for flag in self._option_string_actions if flag.startswith("--"))
        hint = suggest(name.lstrip("-"), known)
        fix = hint.replace("'", "--", 1).replace("'", "") if hint else f"See `{self.prog} --help`"
        return f"unknown flag {name}. {fix}"


class HelpFormatter(argparse.HelpFormatter):
    """A usage line with positional arguments only; switches are shown without a value."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=34, **options)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Add a line such as `usage: tunesmith train [run.yaml] [options]`."""
        shapes = {"?": "[{}]", "*": "[{} ...]", "+": "{0} [{0} ...]"}
        names = [
            shapes.get(str(action.nargs), "{}").format(name)
            for action in actions
            if not action.option_strings and action.help != argparse.SUPPRESS
            for name in [self._metavar_formatter(action, action.dest)(1)[0]]
        ]
        super().add_usage(usage or " ".join([self._prog, *names, "[options]"]), actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return (
            ", ".join(action.option_strings)
            if isinstance(action, Switch)
            else super()._format_action_invocation(action)
        )


def _other_problems(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the problems of known flags and of the config file."""
    given = getattr(args, "given", None)
    if given is None:
        return ()
    try:
        # A positional word may be the value of the misspelled flag, so it is not read as a config file.
        load_config(args.config, given, need_data=False)
    except ConfigError as error:
        return error.problems or (error.line(),)
    return ()


def _plain(flag: str) -> str:
    return flag.replace("-", "_")


MOST_USED = (
    *("train_file", "validation_file", "test_file", "text_column_names", "label_column_name", "model_name_or_path"),
    *("output_dir", "recipe", "time_budget", "num_train_epochs", "learning_rate", "per_device_train_batch_size"),
    *("max_seq_length", "folds", "seed"),
)
"""The options that `train --help` shows; `--help_all` shows the others in their sections."""


class _HelpAll(argparse.Action):
    """Print the help of all options and exit."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for action in parser._actions:
            action.help = vars(action).get("full_help", action.help)
        parser.print_help()
        parser.exit()


def add_config_arguments(
    parser: argparse.ArgumentParser,
    groups: Iterable[str] | None = None,
    *,
    run_folder: bool = False,
    unsupported: Iterable[str] = (),
) -> None:
    """Add a flag for each option, `--config FILE`, and the same file as a positional argument.

    Only the flags that are set are stored, in `args.given`. With `run_folder` the positional argument may be a run folder.
    `groups` limits the flags to some sections of the table and omits the positional argument. The command refuses `unsupported`
    options with a reason, so its help doesn't show them.
    """
    wanted = [option for option in list_options().values() if groups is None or option.group in groups]
    parser.set_defaults(given={})
    parser.epilog = f"`{parser.prog} --help_all` lists all options. Set switches as --bf16, --bf16 false or --no_bf16."
    what = "Config file with options (YAML)" + (", or the folder of a run to continue." if run_folder else ".")
    if groups is None:
        parser.add_argument("config_file", nargs="?", type=user_path, metavar="run.yaml", help=what)
    parser.add_argument("--config", type=user_path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--help_all", action=_HelpAll, nargs=0, help="Show all options and exit.")
    sections: dict[str, Any] = {}
    for option in sorted(wanted, key=lambda option: option.name not in MOST_USED):
        if option.name in MOST_USED:
            _add_option(parser, option)
        else:
            section = sections.get(option.group) or parser.add_argument_group(option.group)
            sections[option.group] = section
            action = _add_option(section, option)
            vars(action)["full_help"], action.help = action.help, argparse.SUPPRESS
    for action in parser._actions:
        if action.dest in unsupported:
            vars(action)["full_help"] = action.help = argparse.SUPPRESS
    # Flags of transformers: accepted but not shown. The loader renames or explains them.
    switches = (
        *("group_by_length", "no_cuda", "overwrite_output_dir", "trust_remote_code", "push_to_hub"),
        *("remove_unused_columns", "do_train", "do_eval", "do_predict", "torch_compile", "save_only_model"),
        *("weights_only", "eval_on_start", "overwrite_cache", "logging_first_step", "dataloader_pin_memory"),
    )
    for name in (*RENAMED, *IGNORED, *REFUSED) if groups is None else ():
        parser.add_argument(f"--{name}", action=_GiveSwitch if name in switches else _Give, help=argparse.SUPPRESS)


def config_from_args(args: argparse.Namespace) -> RunConfig:
    """Return the config of a parsed command line: flags override the file, which overrides the defaults."""
    file, bare = args.config, getattr(args, "config_file", None)
    if file is not None and bare is not None:
        raise ConfigError(f"two config files: {file} and {bare}", fix="Pass one")
    return load_config(file if file is not None else bare, args.given)


class _Give(argparse.Action):
    """Store the text of a flag in `args.given`. Several values are a list; a single one may contain commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if isinstance(values, list):
            values = values[0] if len(values) == 1 else values
        namespace.given = {**namespace.given, self.dest: values}


class _GiveSwitch(_Give, Switch):
    """Accepts `--bf16`, `--bf16 true` and `--bf16 false`."""


class _GiveNo(argparse.Action):
    """Accepts `--no_bf16` as `--bf16 false`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.given = {**namespace.given, self.dest: "false"}


def _add_option(section: Any, option: Option) -> argparse.Action:
    text = f"{option.help}{_default_text(option)}".replace("%", "%%")
    flag = f"--{option.name}"
    action: argparse.Action
    if option.name == "resume_from_checkpoint":  # a value that is not true or false is refused by the loader
        action = section.add_argument(flag, action=_Give, nargs="?", const="true", metavar="true|false", help=text)
    elif bool in option.kinds:
        action = section.add_argument(flag, action=_GiveSwitch, help=text)
        section.add_argument(f"--no_{option.name}", dest=option.name, action=_GiveNo, nargs=0, help=argparse.SUPPRESS)
    else:
        nargs = "+" if option.is_list else None
        action = section.add_argument(flag, action=_Give, nargs=nargs, metavar=_metavar(option), help=text)
    return action


METAVARS = {"time_budget": "TIME", "delimiter": "CHAR", "label_separator": "CHAR"}


def _metavar(option: Option) -> str:
    if option.name in METAVARS:
        return METAVARS[option.name]
    choices = option.choices
    if choices and not option.is_list and len("|".join(choices)) <= 30:
        return "|".join(choices)
    if option.name.endswith("_file"):
        return "FILE"
    if option.name.endswith("_dir"):
        return "FOLDER"
    text = str(option.hint)
    if "float" in text:
        return "X"
    return "NAME" if "str" in text or choices else "N"


def _default_text(option: Option) -> str:
    listed = f" One of: {', '.join(option.choices)}." if len("|".join(option.choices)) > 30 else ""
    default = option.default
    if default in (None, False, (), {}) or "Default:" in option.help or (default == "auto" and "auto:" in option.help):
        return listed
    shown = default if isinstance(default, str) else ", ".join(default) if isinstance(default, tuple) else None
    return f"{listed} Default: {shown if shown is not None else dump_value(default)}."
