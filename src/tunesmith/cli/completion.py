"""Print a completion script: `source <(tunesmith completion bash)`."""

from __future__ import annotations

import argparse

import shtab

from tunesmith.cli.main import list_verbs, load_verb, make_parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="Shell to write for.")


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
            if action.nargs != 0 and action.choices is None:
                vars(action)["complete"] = shtab.FILE  # shells offer files where a value is free
    return tree
