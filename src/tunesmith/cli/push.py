"""`tunesmith push RUN user/name`: the model folder and its card on the Hub."""

from __future__ import annotations

import argparse

from tunesmith.cli.parser import user_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument(
        "run", type=user_path, metavar="RUN", help="run folder with a finished model, or an exported folder"
    )
    parser.add_argument("repo", metavar="REPO", help="repository on the Hub: user/name")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument("--revision", metavar="NAME", help="branch to upload to; default: main")


def run(args: argparse.Namespace) -> int:
    """Uploads and prints the address; gives the exit code."""
    from tunesmith.predict.upload import push_model

    print(push_model(args.run, args.repo, private=args.private, revision=args.revision))
    return 0
