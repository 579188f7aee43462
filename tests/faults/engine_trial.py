"""The run that faults are tested on: a two-layer BERT, 48 rows, 24 steps, a save every 2 steps, dropout on, no command line."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from conftest import tiny_bert, token_lists
from tunesmith.cli.main import explain
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import RunStarted
from tunesmith.files import write_file
from tunesmith.inference.model_folder import export_model
from tunesmith.labels import Task
from tunesmith.runs.folder import RunDir, RunLock
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.checkpoint import Identity, contiguous, load_weights, require_finite
from tunesmith.training.distributed import make_runtime, watch_ranks
from tunesmith.training.evaluation import TaskLoss, predict_rows
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.run_writer import RunWriter
from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

ROWS = 48
DEFAULTS: dict[str, Any] = {
    "rows": ROWS,
    "accumulation": 1,
    "sampling": "group_by_length",
    "epochs": 2,
    "save_every": 2,
    "evaluate_every": 4,
    "patience": None,
    "keep": 1,
    "fast": False,
    "precision": "no",
    "learning_rate": 1e-3,
    "data": "data",
    "versions": {},
    "labels": ["a", "b"],
    "allow_changed": False,
    "fault": None,
    "ignore_labels": False,
    "dropout": 0.1,
    "watch_bytes": False,
    "rank_timeout": None,
    "background": False,
    "ahead": 0,
}


def main(options: dict[str, Any]) -> int:
    """Start or resume the run in options["folder"]; return the exit code of the command line."""
    try:
        run_trial({**DEFAULTS, **options})
    except BaseException as error:
        code, text = explain(error, debug=True)
        with suppress(OSError):  # the log may be on the failing disk
            print(f"tunesmith: {text}", file=sys.stderr, flush=True)
        if code == 1:
            import traceback

            traceback.print_exc()
        return code
    return 0


def warm_up() -> None:
    """Train a step without a run folder, so that lazy imports happen in the server and not in every trial."""
    writer, batches = make_writer(RunDir("/nonexistent"), DEFAULTS)
    events = train_events(writer.state, batches, writer.plan)
    for _ in range(4):
        next(events)
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def run_trial(options: dict[str, Any]) -> None:
    """Run in the order of `finetune`: lock, begin, loop, best weights, export, end."""
    run = RunDir(options["folder"])
    with RunLock(run.lock_file) if int(os.environ.get("RANK", "0")) == 0 else nullcontext():
        writer, batches = make_writer(run, options)
        if options["fault"]:
            name, _, rest = options["fault"].partition(":")
            batches = FAULTS[name](writer, batches, *rest.split(":")) or batches
        with watch_ranks(writer.state.runtime), writer.recording():
            follow(writer, batches, options)


def make_writer(run: RunDir, options: dict[str, Any]) -> tuple[RunWriter, Any]:
    """Return the parts of a run, made from seeds."""
    runtime = make_runtime(use_cpu=True, precision=options["precision"], timeout_seconds=options["rank_timeout"])
    lists = token_lists(options["rows"])
    if options["ignore_labels"]:
        lists["labels"] = [-1] * options["rows"]
    rows = TokenRows.from_lists(lists)
    batches: Any = Batches(
        rows,
        Padding(),
        4 // options["accumulation"] // runtime.world,
        seed=3,
        accumulation=options["accumulation"],
        sampling=options["sampling"],
        rank=runtime.rank,
        world=runtime.world,
        ahead=options["ahead"],
    )
    in_epochs = [batches.steps_in_epoch(e) for e in range(options["epochs"])]
    steps, ends = epoch_ends_for(in_epochs, max_steps=0, num_epochs=options["epochs"])
    plan = Plan(
        steps,
        ends,
        Schedule("linear", options["learning_rate"], 3, steps),
        seed=3,
        evaluate=Calendar("steps", options["evaluate_every"], last=steps),
        save=Calendar("steps", options["save_every"], last=steps),
        metric="loss",
        greater_is_better=False,
        patience=options["patience"],
    )
    model = tiny_bert(dropout=options["dropout"])
    speedups = None
    if options["fast"]:
        from dataclasses import replace

        speedups = apply_speedups(model, rows, Padding(), device=torch.device("cpu"))
        batches = replace(batches, collate=speedups.train_collate)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.1)
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), runtime, speedups=speedups)
    config = {"accumulation": options["accumulation"], "world": runtime.world, "rows": options["rows"]}
    identity = Identity("run", options["data"], config, {"names": options["labels"]}, options["versions"])
    given = {"keep_checkpoints": options["keep"], "allow_changed": options["allow_changed"]}
    writer = RunWriter(run, state, identity, plan=plan, describe=model.config.save_pretrained, **given)
    if options["background"]:
        writer.background_bytes = 0  # these checkpoints are too small to benefit from it
    return writer, batches


def write_model(place: str) -> int:
    """Write a pretrained model folder for the command: weights, config, a tokenizer of 99 words."""
    folder = Path(place)
    model = tiny_bert(dropout=0.1)
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(99))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 64, "do_lower_case": True})
    )
    return 0


def load_folder(given: tuple[str, str]) -> int:
    """Load model and tokenizer of a folder like a run, and tokenize a text; return the exit code of the command line."""
    from tunesmith.labels import LabelMap
    from tunesmith.models.files import load_tokenizer, resolve_model
    from tunesmith.models.load import load_model

    folder, text = given
    try:
        path = resolve_model(folder)
        tokenizer = load_tokenizer(path)
        load_model(path, LabelMap(("a", "b"), Task.BINARY))
        tokenizer(text)
    except BaseException as error:
        code, line = explain(error, debug=True)
        print(f"tunesmith: {line}", file=sys.stderr)
        return code
    return 0


def follow(writer: RunWriter, batches: Any, options: dict[str, Any]) -> None:
    """Run the loop and the steps after it."""
    validation = TokenRows.from_lists(token_lists(20, seed=9))

    def evaluate(state: TrainState) -> dict[str, tuple[dict[str, float | None], int]]:
        with state.vocabulary.whole() if state.vocabulary is not None else nullcontext():
            result = predict_rows(
                state.model,
                validation,
                Padding(),
                state.runtime,
                max_rows=8,
                objective=state.objective,
                on_batch=writer.stop.interrupt if state.runtime.world == 1 else None,
            )
        return {"validation": ({"loss": result.loss}, 20)}

    state = writer.state
    if options["watch_bytes"]:
        watch_bytes(writer.run)
    writer.begin(RunStarted("run", 0, writer.plan.num_steps, 1, 1, options["rows"]))
    for _ in writer.train(batches, evaluate):
        pass
    writer.stop.raise_immediately()
    tensors = digest(state)
    with writer.best_weights() as best:
        if state.speedups is not None:
            state.speedups.close()
        if best is not None:
            load_weights(state.model, best)
    if state.runtime.is_main:
        weights = contiguous(state.model.state_dict())
        require_finite(weights, state.step)
        export_model(writer.run.model, weights, writer.describe, "card", {})
        writer.end("completed")
        outcome = json.dumps({"step": state.step, "tensors": tensors})
        write_file(Path(f"{writer.run.path}.outcome"), outcome.encode())
    state.runtime.barrier()


def watch_bytes(run: RunDir) -> None:
    """Record the size of the run folder before each rename of a finished folder."""
    from tunesmith.runs import folder

    inner = folder.fault_point

    def look(name: str) -> None:
        if name == "save.sealed":
            found = {i.st_ino: i.st_size for p in run.path.rglob("*") if (i := p.stat()) and p.is_file()}
            with open(f"{run.path}.bytes", "a") as out:
                print(sum(found.values()), file=out)
        inner(name)

    folder.fault_point = look


def digest(state: TrainState) -> str:
    """Return the SHA-256 of the sorted tensors of model and optimizer."""
    tensors = {f"model.{n}": t for n, t in state.model.state_dict().items()}
    for index, values in enumerate(state.optimizer.state.values()):
        tensors |= {f"optimizer.{index}.{k}": v for k, v in values.items()}
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class Counter:
    """Calls `act` at the n-th call."""

    def __init__(self, n: int, act: Any) -> None:
        self.n, self.act, self.count = n, act, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.count += 1
        return self.act() if self.count == self.n else None


def signal_at(writer: RunWriter, batches: Any, point: str, n: str, name: str, times: str = "1") -> Any:
    """Send this process a signal when it reaches a point of the step for the n-th time."""

    def send() -> None:
        for _ in range(int(times)):
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    return at_point(writer, batches, point, Counter(int(n), send))


def at_point(writer: RunWriter, batches: Any, point: str, act: Any) -> Any:
    """Add a call at forward, backward, optimizer, evaluate or data."""
    model = writer.state.model
    if point in ("forward", "evaluate"):
        model.register_forward_pre_hook(lambda m, _: act() if m.training == (point == "forward") else None)
    elif point == "backward":
        model.classifier.register_full_backward_hook(lambda *_: act())
    elif point == "optimizer":
        writer.state.optimizer.register_step_pre_hook(lambda *_: act())
    else:
        return Watched(batches, act)
    return None


class Watched:
    """Batches that call `act` before each window."""

    def __init__(self, batches: Any, act: Any) -> None:
        self.batches, self.act = batches, act

    def windows(self, epoch: int, skip: int = 0) -> Any:
        """Yield the windows of an epoch."""
        for window in self.batches.windows(epoch, skip):
            self.act()
            yield window


def nan_gradient(writer: RunWriter, batches: Any, step: str) -> None:
    """Make the gradient of one weight NaN at this step and later (the search for the cause must see it again)."""
    weight = writer.state.model.bert.encoder.layer[1].output.dense.weight
    weight.register_hook(
        lambda grad: torch.full_like(grad, float("nan")) if writer.state.step + 1 >= int(step) else grad
    )


def nan_output(writer: RunWriter, batches: Any, step: str) -> None:
    """Make the output of a layer infinite at this step and later."""
    writer.state.model.bert.pooler.activation.register_forward_hook(
        lambda m, i, out: out * float("inf") if writer.state.step + 1 >= int(step) and m.training else out
    )


def nan_weight(writer: RunWriter, batches: Any, step: str) -> None:
    """Make a weight infinite in the update of a step, although its gradient is finite."""

    def spoil(*_: Any) -> None:
        if writer.state.step + 1 == int(step):
            with torch.no_grad():
                writer.state.model.classifier.weight[0, 0] = float("inf")

    writer.state.optimizer.register_step_post_hook(spoil)


def out_of_memory(writer: RunWriter, batches: Any, where: str, most_rows: str) -> None:
    """Run out of memory for batches with more rows than this, in training (forward or backward) or evaluation."""
    seen = {"rows": 0}

    def look(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen["rows"] = int(kwargs["input_ids"].shape[0])
        if seen["rows"] > int(most_rows) and where == ("forward" if model.training else "evaluate"):
            raise torch.OutOfMemoryError("no memory, as the test asked")

    def backward(*_: Any) -> None:
        if where == "backward" and seen["rows"] > int(most_rows):
            raise torch.OutOfMemoryError("no memory, as the test asked")

    writer.state.model.register_forward_pre_hook(look, with_kwargs=True)
    writer.state.model.classifier.register_full_backward_hook(backward)


def sleepy_save(writer: RunWriter, batches: Any, milliseconds: str) -> None:
    """Sleep randomly around each barrier, differently on every rank."""
    import random

    rng = random.Random(os.getpid())
    runtime = writer.state.runtime
    inner = type(runtime).barrier

    def barrier(self: Any) -> None:
        time.sleep(rng.random() * int(milliseconds) / 1000)
        inner(self)
        time.sleep(rng.random() * int(milliseconds) / 1000)

    type(runtime).barrier = barrier


def on_rank(writer: RunWriter, batches: Any, rank: str, step: str, what: str) -> Any:
    """Raise an error on one rank before a step, or send it a signal."""

    def act() -> None:
        if writer.state.runtime.rank == int(rank) and writer.state.step + 1 == int(step):
            if what == "error":
                raise RuntimeError("an error on one rank, as the test asked")
            os.kill(os.getpid(), getattr(signal, f"SIG{what}"))

    return at_point(writer, batches, "data", act)


def slow(writer: RunWriter, batches: Any, milliseconds: str) -> Any:
    """Delay every step."""
    return at_point(writer, batches, "data", lambda: time.sleep(int(milliseconds) / 1000))


def alarm_in_save(writer: RunWriter, batches: Any, n: str, seconds: str) -> None:
    """Kill the process this many seconds into its n-th save."""
    inner = writer.save
    start = Counter(int(n), lambda: signal.setitimer(signal.ITIMER_REAL, float(seconds)))

    def save(step: int, *, wait: bool = True) -> None:
        start()
        inner(step, wait=wait)

    writer.save = save  # type: ignore[method-assign]


FAULTS = {
    "signal": signal_at,
    "oom": out_of_memory,
    **{
        fault.__name__: fault
        for fault in (alarm_in_save, nan_gradient, nan_output, nan_weight, on_rank, sleepy_save, slow)
    },
}
