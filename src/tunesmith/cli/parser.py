"""argparse with the manners of this command line: dashes or underscores, switches with or without a value, nearest names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from tunesmith.config.convert import WORDS
from tunesmith.config.load import load_config, raise_problems, suggest
from tunesmith.errors import ConfigError


def user_path(text: str) -> str:
    """A path with `~` as the home folder: the shell leaves it as it is in `--output=~/x`."""
    return os.path.expanduser(text)


class Switch(argparse.Action):
    """A flag that may stand alone (`--bf16`), or be followed by true or false. Subclasses store it where they like."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of leaving the process; tells all unknown flags at once, and what is wrong with the others."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The parsed arguments; flags and file names may stand in any order."""
        args, extra = self.parse_known_intermixed_args(self.spell(argv))
        unknown = [word for word in extra if word.startswith("-") and word != "-"]
        if unknown:
            raise_problems([*map(self._unknown_flag, unknown), *_other_problems(args)])
        if extra:
            raise ConfigError(f"unexpected argument {extra[0]!r}", fix=f"See `{self.prog} --help`")
        return args

    def spell(self, argv: Sequence[str]) -> list[str]:
        """The same arguments with each flag as it is registered, and switches without a value as `--flag=true`."""
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
        """A usage problem ends as every other one: one line, exit code 2."""
        raise ConfigError(message, fix=f"See `{self.prog} --help`")

    def _unknown_flag(self, word: str) -> str:
        name = word.partition("=")[0]
        known = tuple(flag[2:] for flag in self._option_string_actions if flag.startswith("--"))
        hint = suggest(name.lstrip("-"), known)
        fix = hint.replace("'", "--", 1).replace("'", "") if hint else f"See `{self.prog} --help`"
        return f"unknown flag {name}. {fix}"


class HelpFormatter(argparse.HelpFormatter):
    """A usage line that names the files, not a hundred flags; a switch is shown as the flag alone."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=34, **options)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """`usage: tunesmith train [run.yaml] [options]`"""
        names = [
            f"[{name}]" if action.nargs in ("?", "*") else name
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
    """What is wrong with the flags that are known, and with the config file."""
    given = getattr(args, "given", None)
    if given is None:
        return ()
    try:
        # A bare word may be the value of the misspelt flag: it is not read as a config file.
        load_config(args.config, given, need_data=False)
    except ConfigError as error:
        return error.problems or (error.line(),)
    return ()


def _plain(flag: str) -> str:
    return flag.replace("-", "_")
