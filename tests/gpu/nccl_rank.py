"""What test_nccl.py starts under torchrun: NCCL on one GPU.

One rank is all that one GPU gives NCCL. DDP wraps the model all the same, gradients and objects go through NCCL's
own calls, and 30 steps must give the losses of the bare model: bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from gpu_engine import OFF, engine_rows, make_state, train

from tunesmith.training.distributed import leave_ranks

failures: list[str] = []


def check(name: str, found: float, limit: float) -> None:
    """One printed line; notes a failure."""
    print(f"{'ok  ' if found <= limit else 'FAIL'} {name}: {found:.3g} (limit {limit:.3g})", flush=True)
    if found > limit:
        failures.append(name)


def main() -> None:
    """Prints a line a check."""
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
