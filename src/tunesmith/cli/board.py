"""`tunesmith board [RUNS_DIR]`: watch runs in the browser, compare them, try a model, stop a run."""

from __future__ import annotations

import argparse
import sys

DEFAULT_PORT = 8321


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("runs_dir", nargs="?", default="runs", metavar="RUNS_DIR", help="folder of run folders [runs]")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"port; 0: any free one [{DEFAULT_PORT}]"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; another one lets the network ask, too (with the token) [127.0.0.1]",
    )
    parser.add_argument(
        "--allow_host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name the board is reached by, as it stands in the browser's address",
    )
    parser.add_argument("--new_token", action="store_true", help="make a new token: pages opened before lose access")


def run(args: argparse.Namespace) -> int:
    """Serves until it is stopped; gives the exit code."""
    from tunesmith.serve.server import LOCAL, serve_board
    from tunesmith.serve.token import load_token

    def ready(address: str) -> None:
        print(f"runs in {args.runs_dir}\n\n  {address}\n\nCtrl-C ends the board; runs go on.", flush=True)
        if args.host not in LOCAL:
            print(
                "note: the network can reach this board. Whoever has the address can use it, and it travels unencrypted.",
                file=sys.stderr,
            )

    serve_board(
        args.runs_dir,
        host=args.host,
        port=args.port,
        token=load_token(new=args.new_token),
        names=args.allow_host,
        on_ready=ready,
    )
    return 0
