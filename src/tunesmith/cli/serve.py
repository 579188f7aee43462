"""Serve a trained model over HTTP."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
from functools import partial
from typing import Any

from tunesmith.cli.board import add_server_arguments, warn_network
from tunesmith.cli.parser import MODEL, add_flags
from tunesmith.cli.predict import read_model_facts
from tunesmith.errors import ConfigError

DEFAULT_PORT = 8322
MIN_KEY = 16
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Settings that let idle matmul threads sleep instead of spin. On two cores shared with the clients, spinning took 62 ms per
row of CPU time instead of 9.7 (all-MiniLM-L6-v2, sentences of subj), at a quarter of the throughput."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_server_arguments(parser, DEFAULT_PORT)
    flags = {
        "--workers N": "Number of worker processes. Default: 1.",
        "--max_error RATE": 'Mark predictions as "answered" only if they are sure enough for this error rate, such as 0.02.',
        "--max_error_per_class": "Keep the limit of --max_error for every predicted class.",
        "--log_requests": "Log one JSON line per request to stderr, without texts.",
    }
    add_flags(parser, MODEL | flags, workers=1)


def run(args: argparse.Namespace) -> int:
    """Serve until it is stopped; return the exit code."""
    from tunesmith.inference.server import Listen, key_file, load_token, serve_forever, serve_with_workers
    from tunesmith.inference.service import DRAIN_SECONDS

    for name, value in WAITING.items():
        os.environ.setdefault(name, value)  # torch reads it when it is imported, which is later
    limit = {"max_error": args.max_error, "per_class": args.max_error_per_class}
    make_service = partial(_make_service, args.run, args.log_requests, limit)
    key = os.environ.get("TUNESMITH_SERVE_KEY") or load_token(key_file(), new=args.new_token)
    if len(key) < MIN_KEY:
        problem = f"TUNESMITH_SERVE_KEY has only {len(key)} characters"
        raise ConfigError(problem, fix=f"Use at least {MIN_KEY} random ones.")
    listen = Listen(args.host, args.port, key, args.allow_host, DRAIN_SECONDS)
    ready = partial(_print_address, args)
    if args.workers == 1:
        serve_forever(make_service(), listen, ready)
        return 0
    threads = max(1, len(os.sched_getaffinity(0)) // args.workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    serve_with_workers(make_service, args.workers, listen, ready)
    return 0


def _make_service(folder: str, log_requests: bool, limit: dict[str, Any]) -> Any:
    from tunesmith.inference.service import PredictionService

    if log_requests:
        log_to_stderr()
    return PredictionService(folder, **limit)


def _print_address(args: argparse.Namespace, address: str) -> None:
    """Print a curl command. It refers to the key but does not contain it, because stdout may be a log file."""
    from tunesmith.inference.server import key_file

    facts = read_model_facts(args)
    body: dict[str, Any] = {"texts": [dict.fromkeys(facts.text_columns, "...") if facts.rendered else "..."]}
    if len(facts.text_columns or ()) == 2:
        body["pairs"] = ["..."]
    in_environment = bool(os.environ.get("TUNESMITH_SERVE_KEY"))
    key = "$TUNESMITH_SERVE_KEY" if in_environment else f"$(cat {shlex.quote(str(key_file()))})"
    print(f"{args.run} at {address}/predict\n")
    print(f'  curl {address}/predict -H "Authorization: Bearer {key}" \\')
    print(f"    -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n", flush=True)
    warn_network(args.host)


def log_to_stderr() -> None:
    """Log route, status, rows and milliseconds of each request to stderr as JSON, but never a text."""
    logger = logging.getLogger("tunesmith.requests")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
