"""`tunesmith serve RUN`: answer requests with the model of a finished run."""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path

from tunesmith.cli.board import add_server_arguments, warn_network
from tunesmith.cli.parser import add_flag
from tunesmith.cli.trained_model import positive
from tunesmith.errors import ConfigError, StoppedBySignal

DEFAULT_PORT = 8322
MIN_KEY = 16
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of a product that wait for each other sleep instead of spinning. With clients on the same two cores, spinning took
62 ms of processor time a row instead of 9.7 (all-MiniLM-L6-v2, sentences of subj), for a quarter of the rows a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "run RUN", "run folder with a finished model, or an exported folder")
    add_server_arguments(parser, DEFAULT_PORT)
    add_flag(parser, "--workers N", "processes that answer at the port [1]", type=positive, default=1)
    add_flag(parser, "--log_requests", "one JSON line a request on stderr, without texts")
    # The number and the table of counters that `_serve_together` gives to each of its workers.
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serves until it is stopped; gives the exit code."""
    from tunesmith.inference.model_folder import is_graph_folder
    from tunesmith.inference.security import key_file, load_token
    from tunesmith.inference.server import serve_forever
    from tunesmith.inference.service import DRAIN_SECONDS, PredictionService, load_in_background
    from tunesmith.inference.supervisor import ServiceCounters, end_with_parent
    from tunesmith.runs.folder import RunDir, open_run

    for name, value in WAITING.items():
        os.environ.setdefault(name, value)  # read once, when torch is loaded: that is later
    folder = Path(args.run)
    worker = [int(word) for word in args.worker.split(":") if word]
    counters = ServiceCounters(worker[1], worker[0]) if worker else None
    service = PredictionService(RunDir(folder) if is_graph_folder(folder) else open_run(args.run), counters=counters)
    key = os.environ.get("TUNESMITH_SERVE_KEY") or load_token(key_file(), new=args.new_token)
    if len(key) < MIN_KEY:
        raise ConfigError(f"TUNESMITH_SERVE_KEY has {len(key)} characters", fix=f"Use at least {MIN_KEY} random ones.")
    if args.workers > 1 and not worker:
        return _serve_together(args, key)
    if args.log_requests:
        log_to_stderr()

    def ready(address: str) -> None:
        if not worker:
            _greet(args, address, key)
        load_in_background(service)

    if worker:
        end_with_parent()
    try:
        serve_forever(
            service,
            host=args.host,
            port=args.port,
            token=key,
            names=args.allow_host,
            on_ready=ready,
            drain_seconds=DRAIN_SECONDS,
            shared=bool(worker),
        )
    except StoppedBySignal as stopped:
        if not worker:  # the process that started the workers says it for all of them
            raise
        return stopped.exit_code
    return 0


def _greet(args: argparse.Namespace, address: str, key: str) -> None:
    from tunesmith.inference.pages import model_facts
    from tunesmith.runs.folder import RunDir

    body = {"texts": ["..."]}
    if len((model_facts(RunDir(Path(args.run))) or {}).get("columns", ())) == 2:
        body["pairs"] = ["..."]
    shown = "$TUNESMITH_SERVE_KEY" if os.environ.get("TUNESMITH_SERVE_KEY") else key
    print(f"{args.run} at {address}/predict, described at {address}/docs\n")
    print(f'  curl {address}/predict -H "Authorization: Bearer {shown}" \\')
    print(f"    -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n", flush=True)
    warn_network(args.host)


def _serve_together(args: argparse.Namespace, key: str) -> int:
    """Starts the workers, which share the cores, and keeps them alive."""
    from tunesmith.inference.server import address_of, open_socket
    from tunesmith.inference.service import DRAIN_SECONDS
    from tunesmith.inference.supervisor import run_workers

    with open_socket(args.host, args.port) as listener:  # alone at first: a port that another program has is refused
        port = int(listener.getsockname()[1])
    words = ["serve", str(args.run), "--host", args.host, "--port", str(port)]
    words += [word for name in args.allow_host for word in ("--allow_host", name)]
    words += ["--log_requests"] * args.log_requests
    threads = str(max(1, len(os.sched_getaffinity(0)) // args.workers))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "TUNESMITH_SERVE_KEY": key}
    _greet(args, address_of(args.host, port), key)
    return run_workers(
        args.workers, lambda number, table: [*words, "--worker", f"{number}:{table}"], environment, DRAIN_SECONDS + 5
    )


def log_to_stderr() -> None:
    """One JSON object a request on stderr: route, status, rows, milliseconds; never a text."""
    logger = logging.getLogger("tunesmith.requests")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
