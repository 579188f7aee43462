"""What a GPU needs before its first step, made ready by a thread while data and model are loaded."""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module

import torch

from tunesmith.training.distributed import has_triton


def start_warming(device: torch.device) -> threading.Thread:
    """The thread, already at work; it is to be joined before anything is captured. On a CPU there is nothing to do."""
    thread = threading.Thread(target=_warm, args=(device,), name="tunesmith-warming", daemon=True)
    if device.type == "cuda":
        thread.start()
    return thread


def finish_warming(thread: threading.Thread) -> None:
    """Waits for it."""
    if thread.ident is not None:
        thread.join()


def _warm(device: torch.device) -> None:
    """cuBLAS in both precisions, cuSOLVER, triton with its key: an error comes again where it is used."""
    with suppress(Exception):
        for dtype in (torch.float32, torch.bfloat16):
            some = torch.ones(64, 64, dtype=dtype, device=device)
            torch.mm(some, some)
        torch.linalg.eigh(torch.eye(2, device=device))
        if has_triton():
            import_module("tunesmith.speedups.attention_kernels")
            import_module("triton.runtime.cache").triton_key()
        torch.cuda.synchronize(device)
