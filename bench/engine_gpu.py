"""Time per training step and per training job on one GPU: BERT-base, MRPC token ids, batches of 8, 64 and 256.

    .venv/bin/python bench/common.py                              # once, on a machine with ../shared
    python bench/engine_gpu.py [--batch 8 64 256] [--jobs 8] [--rounds 3] [--output FILE.json]

Every kind runs in its own process; the processes take turns. First, each runs `--rounds` turns of some steps (medians are
printed). Then, for the batch sizes of `--jobs`, each trains a new model for 3 epochs, CUDA graph captures included. Weights are
random, dropout is on, the learning rate is 5e-5 with linear decay. Memory is the peak of torch's allocator. `our_bf16` is
tunesmith's Trainer, `trainer_*` transformers'.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import arrow_rows, collator, describe_run, engine_rows, pad, trainer_rows

KINDS = ("tunesmith", "trainer_bf16", "trainer_fp32")
SHAPES = {"bert-base": {}, "xlmr": {"vocab_size": 250002}}
OUR_STEPS = 4
"""Turns of tunesmith have this many times more steps; in a short turn, a rare shape would dominate."""
Turn = Callable[[int], dict[str, Any]]


def make_model(shape: str) -> Any:
    """Return a BERT of this shape with random weights on the GPU."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_labels=2, **SHAPES[shape])).cuda()


def our_turns(batch: int, shape: str, epochs: int) -> Turn:
    """Return a function that trains some steps (0: the whole job with a new model) and returns times and losses."""
    from tunesmith.data.batches import Batches, Padding
    from tunesmith.events import SafePoint, StepDone
    from tunesmith.labels import LabelMap
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.evaluation import TaskLoss
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
    from tunesmith.training.state import TrainState

    rows, runtime = engine_rows("mrpc", "train"), make_runtime(precision="bf16")
    labels = LabelMap.for_classes(["0", "1"])

    def start(model: Any, max_steps: int) -> tuple[Any, int, Any]:
        chosen = apply_speedups(model, rows, Padding(), device=runtime.device, precision="bf16")
        batches = Batches(rows, chosen.train_collate, batch, seed=1, sampling="random", ahead=4, pinned=True)
        steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=max_steps, num_epochs=epochs)
        optimizer = make_optimizer(model, learning_rate=5e-5)
        state = TrainState(model, optimizer, TaskLoss(labels.task, 2), runtime, speedups=chosen, only_writer=True)
        plan = Plan(steps, ends, Schedule("linear", 5e-5, 0, steps), seed=1, read_back_every=16)
        return train_events(state, batches, plan), steps, state

    going: list[Any] = []

    def turn(steps: int) -> dict[str, Any]:
        losses, tokens = [], 0
        model = make_model(shape) if steps == 0 or not going else None
        if steps and not going:
            going.extend(start(model, 10**6))
            for _ in range(4 * (len(rows) // batch) + 20):  # capture nearly every shape
                _next(going[0], SafePoint)
        torch.cuda.synchronize()
        began = time.perf_counter()
        events, steps, state = start(model, -1) if steps == 0 else (going[0], OUR_STEPS * steps, going[2])
        done = 0
        while done < steps:
            event = next(events)
            if isinstance(event, StepDone):
                losses.append(event.loss)
                tokens += event.tokens
            done += isinstance(event, SafePoint)
        torch.cuda.synchronize()
        graphs = len(state.graphs) if state.graphs is not None else 0
        return _answer(began, steps, losses, tokens) | {"graphs": graphs}

    events, _, _ = start(make_model(shape), 3)  # load libraries and compile kernels first, as for the other kinds
    for _ in events:
        pass
    return turn


def _next(events: Any, kind: type) -> None:
    while not isinstance(next(events), kind):
        pass


def _answer(began: float, steps: int, losses: list[Any], tokens: int) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    last = [loss for loss in losses[-100:] if loss is not None]
    return {
        "seconds": seconds,
        "steps": steps,
        "loss": statistics.mean(last) if last else None,
        "tokens": tokens,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def their_turns(
    batch: int, shape: str, epochs: int, precision: str, *, compiled: bool = False, own: bool = False
) -> Turn:
    """Return the same for transformers.Trainer, or for tunesmith's if `own`; time starts when training begins."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if own:
        from tunesmith import Trainer

    rows = engine_rows("mrpc", "train")
    rows, padding = (arrow_rows(rows), collator()) if own else (trainer_rows(rows), pad)
    model = make_model(shape)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self, skip: int) -> None:
            self.skip, self.began, self.seconds = skip, 0.0, 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.skip:
                torch.cuda.synchronize()
                self.began = time.perf_counter()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began

    def turn(steps: int) -> dict[str, Any]:
        nonlocal model
        skip = 0 if steps == 0 else 5
        clock = Clock(skip)
        if steps == 0:
            model = make_model(shape)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=steps + skip if steps else -1,
                num_train_epochs=epochs,
                per_device_train_batch_size=batch,
                bf16=precision == "bf16",
                torch_compile=compiled,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_steps=10**6 if steps else 100,
            )
            trainer = Trainer(model, arguments, train_dataset=rows, data_collator=padding, callbacks=[clock])
            trainer.train()
        logs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        answer = _answer(0.0, steps or trainer.state.global_step, logs[-1:], 0)
        return answer | {"seconds": clock.seconds}

    turn(1)
    return turn


def work(kind: str, batch: int, shape: str, epochs: int) -> None:
    """Serve a child process: read a number of steps from stdin, write a JSON line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if kind == "tunesmith":
        turn = our_turns(batch, shape, epochs)
    else:
        turn = their_turns(batch, shape, epochs, kind.split("_")[1], compiled="compile" in kind, own="our" in kind)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps(turn(int(line))), file=out, flush=True)


def ask(process: Any, steps: int) -> dict[str, Any]:
    """Run one turn in a child process."""
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def measure(
    batch: int, shape: str, kinds: list[str], *, rounds: int, steps: int, epochs: int, jobs: list[str]
) -> dict[str, Any]:
    """Measure all kinds at one batch size: turns of some steps, then whole jobs."""
    processes = {}
    for kind in kinds:
        options = f"--work {kind} --batch {batch} --shape {shape} --epochs {epochs}".split()
        command = [sys.executable, __file__, *options]
        processes[kind] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for kind, process in processes.items():
        assert process.stdout.readline().strip() == "ready", f"{kind} did not start"
    found: dict[str, Any] = {kind: {"turns": []} for kind in kinds}
    for _ in range(rounds):
        for kind, process in processes.items():
            found[kind]["turns"].append(ask(process, steps))
    for kind in (kind for kind in kinds if kind in jobs):
        found[kind]["job"] = ask(processes[kind], 0)
        print(f"  {kind}: whole job {found[kind]['job']['seconds']:.2f} s", flush=True)
    for process in processes.values():
        process.stdin.close()
        process.wait(timeout=60)
    return found


def show(batch: int, found: dict[str, Any]) -> None:
    """Print the table of one batch size."""
    ours = found["tunesmith"]
    print(f"\nbatch {batch}        ms/step    ratio  peak GB  ratio  held GB   job s  ratio   loss")
    for kind, result in found.items():
        last, job = result["turns"][-1], result.get("job", {"seconds": float("nan"), "loss": None})
        result["step_ms"] = 1e3 * statistics.median(t["seconds"] / t["steps"] for t in result["turns"])
        result["peak_gb"], result["held_gb"] = (
            max(t[kind] for t in result["turns"]) / 1e9 for kind in ("allocated", "reserved")
        )
        loss = job["loss"] or last["loss"] or float("nan")
        print(
            f"{kind:<16} {result['step_ms']:8.2f} {result['step_ms'] / ours['step_ms']:7.2f} {result['peak_gb']:8.2f} "
            f"{ours['peak_gb'] / result['peak_gb']:6.2f} {result['held_gb']:8.2f} {job['seconds']:8.2f} "
            f"{job['seconds'] / ours.get('job', job)['seconds']:6.2f} "
            f"{loss:7.3f}"
        )


def main() -> None:
    """Print one table per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=192, help="a multiple of 16, because losses are copied from the GPU every 16 steps"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="bert-base")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--job_kinds", nargs="+", help="kinds that run the whole job")
    parser.add_argument("--jobs", type=int, nargs="*", default=[8], help="batch sizes for which the whole job runs")
    parser.add_argument("--output")
    parser.add_argument("--work")
    args = parser.parse_args()
    if args.work:
        work(args.work, args.batch[0], args.shape, args.epochs)
        return
    about = describe_run("cuda") | {"shape": args.shape}
    print(about, flush=True)
    results = {}
    for batch in args.batch:
        options: dict[str, Any] = {"rounds": args.rounds, "steps": args.steps, "epochs": args.epochs, "jobs": []}
        if batch in args.jobs:
            options["jobs"] = args.job_kinds or args.kinds
        found = measure(batch, args.shape, args.kinds, **options)
        show(batch, found)
        results[str(batch)] = found
        if args.output:  # after each batch size: the machine may be taken away
            Path(args.output).write_text(json.dumps(about | {"batches": results}, indent=1))


if __name__ == "__main__":
    main()
