"""One contestant: prepares, takes one step, says so, then trains as many steps as each line on stdin asks for."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tunesmith.config.load import load_config
from tunesmith.config.schema import RunConfig
from tunesmith.measure.contest import Turn
from tunesmith.pipeline.inputs import read_run_data
from tunesmith.pipeline.plan import peak_bytes
from tunesmith.pipeline.prepare import Prepared, prepare, start_runtime
from tunesmith.pipeline.watch import Watch

Train = Callable[[int], Turn]
"""Trains so many steps."""


def make_prepared(config: RunConfig) -> Prepared:
    """Data, tokens (from the cache), model, batches: as `tunesmith train` makes them."""
    data = {"train": None, "validation": None, "test": None}
    watch = Watch()
    return prepare(config, start_runtime(config), lambda: read_run_data(config, data, watch.progress), watch)


def make_contestant(kind: str, prepared: Prepared, folder: str) -> Train:
    """The training of one kind."""
    if kind == "tunesmith":
        from tunesmith.measure.ours import train_ours

        return train_ours(prepared)
    from tunesmith.measure.peers import train_loop, train_trainer

    if kind == "loop":
        return train_loop(prepared)
    on_gpu = prepared.runtime.device.type == "cuda"
    compiled = kind == "trainer_compiled"
    half = kind == "trainer_bf16" or (compiled and on_gpu and not prepared.config.fp16)
    return train_trainer(prepared, folder, grouped=kind != "trainer", bf16=half, compiled=compiled)


def main(kind: str, options: dict[str, Any]) -> None:
    """Answers until stdin ends."""
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is not an answer
    prepared = make_prepared(load_config(None, options))
    with tempfile.TemporaryDirectory() as folder:
        train = make_contestant(kind, prepared, folder)
        train(1)
        print(json.dumps({"bench": kind}), file=out, flush=True)
        for line in sys.stdin:
            turn = train(int(json.loads(line)["steps"]))
            answer = {"bench": kind, **asdict(turn), "peak_bytes": peak_bytes(prepared)}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
