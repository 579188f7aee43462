"""Parts of torch and transformers that wait until they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from tunesmith.cli import late_modules
from tunesmith.cli.late_modules import _was_tried

LOADS = """
import sys
from tunesmith.cli.late_modules import StandIn, is_late, load_late
load_late()
import transformers.models.bert.modeling_bert as bert
import torch, transformers.masking_utils as masks
for name in ("torch._dynamo", "torch.distributed.tensor", "sympy", "scipy.optimize"):
    assert is_late(name), f"{name} is loaded"
from transformers.distributed.tensor_parallel import DTensor
assert not isinstance(torch.ones(1), DTensor)
config = bert.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
model = bert.BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 3, dtype=torch.long)).logits.sum().backward()
optimizer.step()
drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
assert is_late("torch._meta_registrations"), "a generator loads the meta kernels"
assert is_late("torch._dynamo"), "a step of training loads the compiler"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item() == 1.0
assert not is_late("torch._dynamo") and not is_late("torch._meta_registrations")
assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(1)))
import torch._dynamo.utils
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
from torch.distributed.tensor import DTensor as real
assert real.__module__ == "torch.distributed.tensor" and real.from_local
assert not isinstance(sys.modules["torch.distributed.tensor"], StandIn) or real.from_local is not None
from scipy.optimize import minimize
assert abs(minimize(lambda x: float((x[0] - 2) ** 2), [0.0]).x[0] - 2) < 1e-3
"""


def test_a_model_trains_without_the_compiler_and_what_is_used_is_the_real_thing() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("found", "tried"), [("2.12.1", True), ("2.14.0", False), ("3.0", False), ("odd", False)])
def test_versions_that_were_not_tried_load_as_usual(found: str, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_modules, "version", lambda package: found)
    assert _was_tried("torch", (2, 11), (2, 13)) is tried


def test_the_end_of_a_command_waits_for_threads_and_runs_what_was_registered(tmp_path: Path) -> None:
    source = (
        "import atexit, threading, time, pathlib\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from tunesmith.cli.main import leave\n"
        f"out = pathlib.Path({str(tmp_path)!r})\n"
        "atexit.register(lambda: (out / 'registered').touch())\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), (out / 'thread').touch())).start()\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(int)\n"
        "print('printed', end='')\n"
        "leave(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout) == (3, "printed"), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"registered", "thread"}
