"""NCCL on one GPU, started by test_nccl.py with torchrun.

NCCL allows one rank per GPU. DDP still wraps the model, gradients and objects go through NCCL, and the losses of 30 steps must be
bit-identical to those of the bare model.
"""

from __future__ import annotations

import numpy as np
import torch
from gpu_engine import OFF, engine_rows, make_state, train

from tunesmith.training.distributed import leave_ranks

failures: list[str] = []


def check(name: str, found: float, limit: float) -> None:
    """Print a line and record a failure."""
    print(f"{'ok  ' if found <= limit else 'FAIL'} {name}: {found:.3g} (limit {limit:.3g})", flush=True)
    if found > limit:
        failures.append(name)


def main() -> None:
    """Print one line per check."""
    rows = engine_rows("mrpc", "train")
    bare = make_state(rows, 2, "no", 0.0, **OFF)
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    print(f"backend {backend}, world {torch.distributed.get_world_size() if backend != 'none' else 0}", flush=True)
    check("the backend is NCCL", float("nccl" not in str(backend)), 0)
    expected = train(*bare[:2], 30)
    state, batches, _ = make_state(rows, 2, "no", 0.0, **OFF)
    state.wrapped = state.runtime.accelerator.prepare_model(state.model)
    wrapped = type(state.wrapped).__name__
    if wrapped != "DistributedDataParallel":
        state.wrapped = torch.nn.parallel.DistributedDataParallel(state.model, device_ids=[torch.cuda.current_device()])
    found = train(state, batches, 30)
    check(
        f"DDP over NCCL ({wrapped} from accelerate): losses of 30 steps",
        float(np.abs(np.subtract(found, expected)).max()),
        0,
    )
    total = torch.ones(4, device="cuda")
    torch.distributed.all_reduce(total)
    gathered: list[object] = [None]
    torch.distributed.all_gather_object(gathered, {"rank": 0})
    check("all_reduce and gather_object", float(total.sum() != 4 or gathered != [{"rank": 0}]), 0)
    leave_ranks()
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {', '.join(failures)}")
    print("all checks passed")


if __name__ == "__main__":
    main()
