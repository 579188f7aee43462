"""Watch and compare runs in the browser."""

from __future__ import annotations

import argparse
import shlex
import sys

from tunesmith.cli.parser import add_flags

DEFAULT_PORT = 8321


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_flags(parser, {"runs_dir RUNS_DIR?": "Folder that contains run folders. Default: runs."}, runs_dir="runs")
    add_server_arguments(parser, DEFAULT_PORT)


def add_server_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the flags of commands that listen on a port."""
    flags = {
        "--port PORT": f"Port; 0: any free port. Default: {port}.",
        "--host ADDRESS": "Address to listen on. Other machines can connect if it is not local. Default: 127.0.0.1.",
        "--new_token": "Create a new token and revoke the old one.",
    }
    add_flags(parser, flags, port=port, host="127.0.0.1")
    text = "Additional host name to accept, as it appears in the URL. Repeatable."
    parser.add_argument("--allow_host", action="append", default=[], metavar="NAME", help=text)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; return the exit code."""
    from tunesmith.inference.board import Board
    from tunesmith.inference.server import Listen, load_token, serve_forever, token_file

    board = Board(args.runs_dir)
    token = load_token(new=args.new_token)

    def ready(address: str) -> None:
        # A file or a pipe may be a log that others read.
        shown = token if sys.stdout.isatty() else f"$(cat {shlex.quote(str(token_file()))})"
        print(f"runs in {args.runs_dir}\n\n  {address}/?token={shown}\n")
        print("Press Ctrl-C to stop the board; runs continue.", flush=True)
        warn_network(args.host)

    serve_forever(board, Listen(args.host, args.port, token, args.allow_host), ready)
    return 0


def warn_network(host: str) -> None:
    """Warn if other machines can connect."""
    from tunesmith.inference.server import LOCAL

    if host not in LOCAL:
        words = (
            "other machines can connect to this port. Anyone who has the token can use it, and it is sent unencrypted."
        )
        print(f"note: {words}", file=sys.stderr)
