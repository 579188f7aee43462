"""Print a completion script: `source <(tunesmith completion bash)`."""

from __future__ import annotations

import argparse

import shtab

from tunesmith.cli.main import list_verbs, load_verb, make_parser
from tunesmith.cli.parser import Switch, add_flag
from tunesmith.config.convert import choices_of
from tunesmith.config.schema import list_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    add_flag(parser, "shell", "Shell to write for.", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    print(shtab.complete(make_tree(), args.shell, root_prefix="tunesmith"))
    return 0


def make_tree() -> argparse.ArgumentParser:
    """All verbs under one parser. The command itself makes the parser of one verb only, since it starts faster."""
    tree = argparse.ArgumentParser(prog="tunesmith", allow_abbrev=False)
    tree.add_argument("--version", action="version", version="")
    verbs = tree.add_subparsers()
    for verb, text in list_verbs().items():
        parents = [make_parser(verb, load_verb(verb))]
        parser = verbs.add_parser(verb, help=text, parents=parents, add_help=False, allow_abbrev=False)
        for action in parser._actions:
            if isinstance(action, Switch):
                action.choices = ("true", "false")
            elif (option := list_options().get(action.dest)) is not None and action.nargs != 0:
                action.choices = choices_of(option.hint) or None  # the parser leaves checking to the config
            if action.nargs != 0 and action.choices is None:
                vars(action)["complete"] = shtab.FILE  # shells offer files where a value is free
    return tree
