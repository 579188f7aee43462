"""`tunesmith push RUN user/name`: the model folder and its card on the Hub."""

from __future__ import annotations

import argparse

from tunesmith.cli.parser import add_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "run RUN", "run folder with a finished model, or an exported folder")
    add_flag(parser, "repo REPO", "repository on the Hub: user/name")
    add_flag(parser, "--private", "make the repository a private one")
    add_flag(parser, "--revision NAME", "branch to upload to; default: main")


def run(args: argparse.Namespace) -> int:
    """Uploads and prints the address; gives the exit code."""
    from tunesmith.predict.upload import push_model

    print(push_model(args.run, args.repo, private=args.private, revision=args.revision))
    return 0
