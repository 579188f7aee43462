"""Training steps of the engine and of transformers.Trainer as functions that train some more steps and give the time of each.

On a CPU every step is timed. On a GPU the host runs ahead of the device: there a turn is timed as a whole, and what comes
back is one number, the mean step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from token_files import TOKENS, pad
from tunesmith.data.tokens import TokenRows

Turns = Callable[[int], list[float]]
WARM_UP = {"cpu": 2, "cuda": 5}
FIRST_ON_GPU = 300
"""Steps before the first turn on a GPU: each bucket of shapes is captured by then."""


def make_model(shape: str) -> Any:
    """all-MiniLM-L6-v2, or BERT-base's or a tiny BERT's shape with random weights."""
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    if shape == "minilm":
        return AutoModelForSequenceClassification.from_pretrained(str(TOKENS / "minilm"), num_labels=2, dtype="float32")
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(num_labels=2, **(tiny if shape == "tiny" else {})))


def wait(device: str) -> None:
    """Until a GPU has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def our_turns(
    rows: TokenRows, batch: int, *, device: str = "cpu", precision: str = "fp32", shape: str = "minilm", start: int = 0
) -> Turns:
    """The engine as `tunesmith train` sets it up by default; `start` is the step of the first epoch to begin with."""
    from accelerate.state import AcceleratorState

    from tunesmith.data.batches import Batches, Padding
    from tunesmith.events import Event, SafePoint
    from tunesmith.labels import Task
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.evaluation import TaskLoss
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
    from tunesmith.training.state import TrainState

    half: Any = "bf16" if precision == "bf16" else "no"
    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of an earlier turn left its precision there
    runtime = make_runtime(precision=half, use_cpu=device == "cpu")
    on_gpu = runtime.device.type == "cuda"
    model = make_model(shape).to(runtime.device)
    chosen = apply_speedups(model, rows, Padding(), device=runtime.device, precision=half)
    order = chosen.best_order(runtime.device)
    batches = Batches(rows, chosen.train_collate, batch, 1, sampling=order, ahead=4 if on_gpu else 0, pinned=on_gpu)
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=10**7, num_epochs=1)
    optimizer = make_optimizer(model, learning_rate=5e-5)
    state = TrainState(
        model, optimizer, TaskLoss(Task.BINARY, 2), runtime, speedups=chosen, step=start, only_writer=True
    )
    plan = Plan(steps, ends, Schedule("constant", 5e-5, 0, steps), seed=1, read_back_every=16 if on_gpu else 1)
    events: Iterator[Event] = train_events(state, batches, plan)
    first = True

    def take(count: int) -> list[float]:
        nonlocal first
        for _ in range(WARM_UP[device] + (FIRST_ON_GPU if first and on_gpu else 0)):
            _step(events, SafePoint)
        first = False
        wait(device)
        times, began = [], time.perf_counter()
        for _ in range(count):
            _step(events, SafePoint)
            times.append(time.perf_counter())
        return _spent(times, began, device)

    return take


def _step(events: Iterator[Any], kind: type) -> None:
    while not isinstance(next(events), kind):
        pass


def _spent(times: list[float], began: float, device: str) -> list[float]:
    if device == "cuda":
        wait(device)
        return [(time.perf_counter() - began) / len(times)]
    return [b - a for a, b in zip([began, *times], times, strict=False)]


def their_turns(
    rows: Any,
    batch: int,
    sampling: str = "random",
    *,
    device: str = "cpu",
    precision: str = "fp32",
    shape: str = "minilm",
) -> Turns:
    """transformers.Trainer: a fresh one a turn on one model; its start-up is not counted. `rows` are dicts by index."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    model = make_model(shape)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM_UP[device]:
                wait(device)
            self.times.append(time.perf_counter())

    turn = 0

    def take(count: int) -> list[float]:
        nonlocal turn
        turn += 1
        clock, skip = Clock(), WARM_UP[device]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=count + skip,
                per_device_train_batch_size=batch,
                train_sampling_strategy=sampling,
                lr_scheduler_type="constant",
                bf16=precision == "bf16",
                use_cpu=device == "cpu",
                seed=turn,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            trainer = Trainer(model, arguments, train_dataset=rows, data_collator=pad, callbacks=[clock])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            wait(device)
            ended = time.perf_counter()
        if device == "cuda":
            return [(ended - clock.times[skip - 1]) / count]
        return [b - a for a, b in zip(clock.times[skip - 1 :], clock.times[skip:], strict=False)]

    return take
