"""`tunesmith serve RUN`: answer requests with the model of a finished run."""

from __future__ import annotations

import argparse

from tunesmith.cli.board import add_server_arguments, warn_network
from tunesmith.cli.parser import user_path

DEFAULT_PORT = 8322


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("run", type=user_path, metavar="RUN", help="run folder with a finished model")
    add_server_arguments(parser, DEFAULT_PORT)


def run(args: argparse.Namespace) -> int:
    """Serves until it is stopped; gives the exit code."""
    from tunesmith.run.layout import open_run
    from tunesmith.serve.prediction import PredictionService
    from tunesmith.serve.server import serve_forever
    from tunesmith.serve.token import load_token

    service = PredictionService(open_run(args.run))
    token = load_token(new=args.new_token)

    def ready(address: str) -> None:
        print(f"{args.run} at {address}/predict\n")
        print(f"  curl {address}/predict -H 'Authorization: Bearer {token}' \\")
        print("    -H 'Content-Type: application/json' -d '{\"texts\": [\"...\"]}'\n", flush=True)
        warn_network(args.host)

    serve_forever(service, host=args.host, port=args.port, token=token, names=args.allow_host, on_ready=ready)
    return 0
