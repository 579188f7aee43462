"""DDP over NCCL with one rank on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_ddp_over_nccl_losses_equal_bare_model() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1"]
    command.append(str(Path(__file__).with_name("nccl_rank.py")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all checks passed" in done.stdout
