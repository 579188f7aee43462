"""`tunesmith board [RUNS_DIR]`: watch runs in the browser, compare them, try a model, stop a run."""

from __future__ import annotations

import argparse
import sys

from tunesmith.cli.parser import add_flag

DEFAULT_PORT = 8321


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "runs_dir RUNS_DIR", "folder of run folders [runs]", nargs="?", default="runs")
    add_server_arguments(parser, DEFAULT_PORT)


def add_server_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    """The flags of every command that listens."""
    add_flag(parser, "--port N", f"port; 0: any free one [{port}]", type=int, default=port)
    add_flag(
        parser,
        "--host ADDRESS",
        "address to listen on; with another one, the network can reach it, too (with the token) [127.0.0.1]",
        default="127.0.0.1",
    )
    add_flag(
        parser,
        "--allow_host NAME",
        "another name it is reached by, as it stands in the address; may be given several times",
        action="append",
        default=[],
    )
    add_flag(parser, "--new_token", "make a new token; the old one no longer works")


def run(args: argparse.Namespace) -> int:
    """Serves until it is stopped; gives the exit code."""
    from tunesmith.inference.board import Board
    from tunesmith.inference.security import load_token
    from tunesmith.inference.server import Listen, serve_forever

    board = Board(args.runs_dir)
    token = load_token(new=args.new_token)

    def ready(address: str) -> None:
        print(
            f"runs in {args.runs_dir}\n\n  {address}/?token={token}\n\nCtrl-C ends the board; runs continue.",
            flush=True,
        )
        warn_network(args.host)

    serve_forever(board, Listen(args.host, args.port, token, args.allow_host), ready)
    return 0


def warn_network(host: str) -> None:
    """Warns of what listening on the network means."""
    from tunesmith.inference.server import LOCAL

    if host not in LOCAL:
        words = "the network can reach this port. Anyone who has the token can use it, and it travels unencrypted."
        print(f"note: {words}", file=sys.stderr)
