"""The device, ranks and precision of a run. The only module that uses `accelerate`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

from tunesmith.data.batches import Batch
from tunesmith.errors import ConfigError, WorkerError, short_text
from tunesmith.models.families import why_not
from tunesmith.runs.folder import read_launch

Precision = Literal["no", "bf16", "fp16"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """One process of a run. On a single process, the exchange methods do nothing."""

    accelerator: Any
    device: torch.device
    precision: Precision
    rank: int
    world: int

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes files and prints."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model on its device, wrapped in DDP on several ranks."""
        if self.world == 1:
            return model.to(self.device)
        from accelerate import DistributedDataParallelKwargs

        # In a known family every parameter has a gradient; in others, DDP would wait for one without.
        unknown = why_not(model) is not None
        self.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=unknown)
        wrapped: nn.Module = self.accelerator.prepare_model(model)
        return wrapped

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of forward passes."""
        if self.precision == "no":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def sync_when(self, last: bool, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Let ranks exchange gradients only in the last backward pass of a step."""
        if last or self.world == 1:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return context

    def move(self, batch: Batch) -> Batch:
        """Return the batch on the device."""
        if self.device.type == "cpu":
            return batch
        inputs = {k: v.to(self.device, non_blocking=True) for k, v in batch.inputs.items()}
        labels = None if batch.labels is None else batch.labels.to(self.device, non_blocking=True)
        return replace(batch, inputs=inputs, labels=labels)

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks."""
        if self.world == 1:
            return value
        total: torch.Tensor = self.accelerator.reduce(value, reduction="sum")
        return total

    def gather_objects(self, value: Any) -> list[Any]:
        """Return each rank's value (numbers, text, arrays, lists, dicts), by rank, on every rank. Nothing is pickled."""
        if self.world == 1:
            return [value]
        from tunesmith.training.checkpoint import from_bytes, to_bytes

        mine = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8).to(self.device)
        size = torch.tensor([len(mine)], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.world)]
        torch.distributed.all_gather(sizes, size)
        longest = max(int(s) for s in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8, device=self.device) for _ in range(self.world)]
        torch.distributed.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))))
        return [from_bytes(p[: int(s)].cpu().numpy().tobytes()) for p, s in zip(parts, sizes, strict=True)]

    def largest(self, value: int) -> int:
        """Return the largest of the ranks' numbers, much cheaper than gathering objects."""
        if self.world == 1:
            return value
        number = torch.tensor([value], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return int(number)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            self.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0 first, then on the others, which find its caches."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()


def make_runtime(
    *, precision: Precision = "no", use_cpu: bool = False, timeout_seconds: float | None = None
) -> Runtime:
    """Return the runtime of this process (a single process, or started by torchrun, accelerate launch or notebook_launcher).

    A rank that doesn't answer for `timeout_seconds` ends the others (default: torch's half hour).
    """
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    _refuse_launcher_options()
    AcceleratorState._reset_state()  # as transformers does: an earlier Trainer may have chosen a different precision
    timeout = [] if timeout_seconds is None else [InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_seconds))]
    asked = read_launch().world
    # Without a GPU, accelerate joins the ranks only with cpu=True.
    on_cpu = use_cpu or (asked > 1 and not torch.accelerator.is_available())
    try:
        accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=timeout or None)
    except torch.distributed.DistError as error:
        raise WorkerError(
            f"rank {os.environ.get('RANK', '?')} of {asked} could not connect to the others: {short_text(error)}",
            fix="Check the output of the other ranks; --ddp_timeout sets how long a rank waits.",
        ) from error
    if accelerator.num_processes < asked:
        raise ConfigError(
            f"this process was launched as one of {asked}, but it has no other ranks: each would train a whole run",
            fix="Set use_cpu (--use_cpu) if there is no GPU, and create no Accelerator before.",
        )
    device, world = accelerator.device, accelerator.num_processes
    _require_precision(precision, device)
    if world > 1:
        wait_for_gloo_at_exit()
    return Runtime(accelerator, device, precision, accelerator.process_index, world)


def _require_precision(precision: Precision, device: torch.device) -> None:
    """Raise a ConfigError if the device doesn't support this precision."""
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError(
            "fp16 needs a GPU, and this run is on a CPU", fix="Omit --fp16, or use --bf16, which works on a CPU."
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU does not support bf16", fix="Use --fp16.")


def has_bf16(*, use_cpu: bool = False) -> bool:
    """Return whether the default device is a GPU with bf16 support."""
    return not use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Let the threads of gloo finish before the interpreter ends.

    They release the tensors of the last exchange after it is complete and need Python's lock for it. An interpreter
    that is ending refuses the lock, and the process is aborted with its work done (seen in 3 to 5 of 12 runs on a busy
    machine, with transformers.Trainer as well).
    """
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    """Sleep, which releases Python's lock, until no gloo thread ran in four consecutive checks."""
    quiet, until = 0, time.monotonic() + 30
    while quiet < 4 and time.monotonic() < until:
        time.sleep(0.05)
        busy = any(_runs_gloo(file) for file in Path("/proc/self/task").glob("*/stat"))
        quiet = 0 if busy else quiet + 1


def _runs_gloo(file: Path) -> bool:
    """Return whether this is the state of a thread of gloo that is running; a thread may end at any moment."""
    try:
        name, _, rest = file.read_text().rpartition(")")
    except OSError:
        return False
    return "gloo" in name and rest.split()[0] == "R"


def leave_ranks() -> None:
    """Leave the process group at the end of the command; NCCL warns otherwise."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _refuse_launcher_options() -> None:
    """Refuse or report options of `accelerate launch` that tunesmith does not use."""
    for name, variable in (("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"), ("FSDP", "ACCELERATE_USE_FSDP")):
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise ConfigError(
                f"the launcher requests {name}, but this loop trains with DDP",
                fix="Launch with torchrun or `accelerate launch --multi_gpu`, or use tunesmith.Trainer.",
            )
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", ""):
        log.warning("the launcher's mixed precision (%s) is not used: --bf16 or --fp16 of the run decide", asked)


@functools.cache
def has_triton() -> bool:
    """Return whether fused kernels can be compiled here."""
    return torch.cuda.is_available() and find_spec("triton") is not None


SECONDS_TO_DIE = 2.0
"""How long a survivor looks for the lost process: an exchange may fail before the process is gone."""

_LOST = re.compile(
    r"closed by peer|connection reset|timed? ?out|pair closure|broken pipe|no route|remote process exited|socket|nccl|gloo|"
    r"c10d|process group|recvvalue|sendbytes",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankRoster:
    """(host, process) of every rank, by rank."""

    places: tuple[tuple[str, int], ...]
    rank: int

    def lost(self, who: str) -> WorkerError:
        """Return the error that ends this rank."""
        fix = "See its output for the reason. Run the same command to resume from the last checkpoint."
        return WorkerError(f"{who} no longer responds; rank {self.rank} exits", fix=fix)

    def explain(self, error: RuntimeError) -> WorkerError | None:
        """Return the error of a lost rank, with its number if that can be seen; None if the error is about something else."""
        if not _LOST.search(str(error)):
            return None
        until = time.monotonic() + SECONDS_TO_DIE
        while not (gone := self.gone()) and time.monotonic() < until:
            time.sleep(0.05)
        first = " ".join(str(error).split("\n")[0].split())[:200]
        return self.lost(", ".join(gone) if gone else f"another rank ({first})")

    def gone(self, *, stopped: bool = True) -> list[str]:
        """Describe the ranks of this machine whose process is dead or, with `stopped`, stopped."""
        found, here = [], socket.gethostname()
        for rank, (host, pid) in enumerate(self.places):
            state = _state_of(pid) if host == here and rank != self.rank else "running"
            if state != "running" and (stopped or state != "is stopped"):
                found.append(f"rank {rank} (process {pid} on {host}) {state} and")
        return found


def _state_of(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone" if Path("/proc/self").exists() else "running"
    return {"Z": "has died", "X": "has died", "T": "is stopped", "t": "is stopped"}.get(letter, "running")


LOOK_EVERY = 1.0
GRACE_SECONDS = 6.0
"""How long a rank may take to notice a loss. gloo raises immediately; NCCL can wait forever."""


@contextmanager
def watch_ranks(runtime: Runtime) -> Iterator[None]:
    """End this rank if another one is lost: with a WorkerError, or at least with exit code 7.

    Leave it after a barrier: a rank that leaves earlier counts as lost.
    """
    if runtime.world == 1:
        yield
        return
    roster = RankRoster(tuple(runtime.gather_objects((socket.gethostname(), os.getpid()))), runtime.rank)
    done = threading.Event()
    threading.Thread(target=_look, args=(roster, done), name="tunesmith-rank-watch", daemon=True).start()
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _when_terminated(roster)) if on_main else None
    after: Any = before
    try:
        yield
    except RuntimeError as error:
        lost = roster.explain(error)
        if lost is None:
            raise
        after = signal.SIG_IGN  # the launcher's SIGTERM must not arrive before the message and exit code 7
        raise lost from error
    except WorkerError:
        after = signal.SIG_IGN
        raise
    finally:
        done.set()
        if on_main:
            signal.signal(signal.SIGTERM, after)


def _look(roster: RankRoster, done: threading.Event) -> None:
    """End this process if another rank has been dead for GRACE_SECONDS."""
    since: float | None = None
    while not done.wait(LOOK_EVERY):
        gone = roster.gone(stopped=False)
        if not gone:
            since = None
            continue
        since = since or time.monotonic()
        if time.monotonic() - since >= GRACE_SECONDS:
            log.error("%s did not respond; rank %d exits", " ".join(gone).removesuffix(" and"), roster.rank)
            # The main thread waits in C++ for the dead rank: Python delivers neither exceptions nor signal handlers there, and
            # sys.exit ends only this thread. Nothing is lost: checkpoints are published by a rename, on rank 0.
            os._exit(WorkerError.exit_code)


def _when_terminated(roster: RankRoster) -> Any:
    """Return a handler of SIGTERM, by which launchers end the other ranks: one that can see the reason reports it."""

    def arrived(number: int, frame: FrameType | None) -> None:
        gone = roster.gone(stopped=False)
        if gone:
            signal.signal(number, signal.SIG_IGN)
            raise roster.lost(gone[0])
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return arrived
