"""The same script on one rank and on two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.launching import free_port
from scripts import run_script


def result_of(text: str, folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a script and return its JSON line; with a launcher, it runs in new processes."""
    folder.mkdir()
    file = folder / "script.py"
    file.write_text(text)
    if launcher:
        command = [sys.executable, *launcher, str(file), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        out = done.stdout
    else:
        out = run_script(file, *words)
    result: dict[str, Any] = json.loads(next(x for x in reversed(out.splitlines()) if x.startswith('{"')))
    return result


RANKS = """
import json, sys
import numpy as np
import torch
sys.path.insert(0, sys.argv[2])
from conftest import tiny_bert
from trainer_toys import Accuracy, Regression, RegressionDataset, arguments
from tunesmith import Trainer

world = int(sys.argv[3])
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(1, 8), torch.nn.Linear(8, 1)

    def forward(self, input_x, labels=None):
        y = self.outer(torch.tanh(self.inner(input_x[:, None])))[:, 0]
        return (y,) if labels is None else (torch.nn.functional.mse_loss(y, labels), y)


trainer = Trainer(
    Net(),
    arguments(
        sys.argv[1], per_device_train_batch_size=8 // world, gradient_accumulation_steps=2, logging_steps=1, num_train_epochs=2,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, learning_rate=0.02,
    ),
    train_dataset=RegressionDataset(length=32),
    eval_dataset=RegressionDataset(length=16, seed=1),
    compute_metrics=Accuracy(),
)
trainer.train()
output = trainer.predict(RegressionDataset(length=19, seed=2))
if trainer.is_world_process_zero():
    print(json.dumps({
        "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
        "evaluations": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
        "predictions": output.predictions.tolist(),
        "labels": output.label_ids.tolist(),
        "best": trainer.state.best_global_step,
    }))
"""


@pytest.mark.slow
def test_two_ranks_of_four_equal_one_rank_of_eight(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    one = result_of(RANKS, tmp_path / "one", str(tmp_path / "one" / "out"), tests, "1")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()))
    two = result_of(RANKS, tmp_path / "two", str(tmp_path / "two" / "out"), tests, "2", launcher=launcher)
    assert np.allclose(one["losses"], two["losses"], atol=1e-6)
    assert len(one["losses"]) == 4
    assert np.allclose(one["evaluations"], two["evaluations"], atol=1e-6)
    assert np.allclose(one["predictions"], two["predictions"], atol=1e-5)
    assert one["labels"] == two["labels"]
    assert one["best"] == two["best"]
    assert sorted(p.name for p in (tmp_path / "one" / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "two" / "out").iterdir()
    )
