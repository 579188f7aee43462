"""`tunesmith serve RUN`: answer requests with the model of a finished run."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from tunesmith.cli.board import add_server_arguments, warn_network
from tunesmith.cli.parser import user_path
from tunesmith.errors import ConfigError

DEFAULT_PORT = 8322
MIN_KEY = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument(
        "run", type=user_path, metavar="RUN", help="run folder with a finished model, or an exported folder"
    )
    add_server_arguments(parser, DEFAULT_PORT)
    parser.add_argument("--log_requests", action="store_true", help="one JSON line a request on stderr, without texts")


def run(args: argparse.Namespace) -> int:
    """Serves until it is stopped; gives the exit code."""
    from tunesmith.predict.graph_facts import is_graph_folder
    from tunesmith.run.layout import RunDir, open_run
    from tunesmith.serve.prediction import PredictionService, load_in_background
    from tunesmith.serve.server import serve_forever
    from tunesmith.serve.token import key_file, load_token

    folder = Path(args.run)
    service = PredictionService(RunDir(folder) if is_graph_folder(folder) else open_run(args.run))
    key = os.environ.get("TUNESMITH_SERVE_KEY") or load_token(key_file(), new=args.new_token)
    if len(key) < MIN_KEY:
        raise ConfigError(f"TUNESMITH_SERVE_KEY has {len(key)} characters", fix=f"Use at least {MIN_KEY} random ones.")
    if args.log_requests:
        log_to_stderr()

    def ready(address: str) -> None:
        shown = "$TUNESMITH_SERVE_KEY" if os.environ.get("TUNESMITH_SERVE_KEY") else key
        print(f"{args.run} at {address}/predict, described at {address}/docs\n")
        print(f"  curl {address}/predict -H 'Authorization: Bearer {shown}' \\")
        print("    -H 'Content-Type: application/json' -d '{\"texts\": [\"...\"]}'\n", flush=True)
        warn_network(args.host)
        load_in_background(service)

    serve_forever(service, host=args.host, port=args.port, token=key, names=args.allow_host, on_ready=ready)
    return 0


def log_to_stderr() -> None:
    """One JSON object a request on stderr: route, status, rows, milliseconds; never a text."""
    logger = logging.getLogger("tunesmith.requests")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
