"""A data-loader worker that dies, fails or hangs ends the run with its name and rows, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from patience import patient
from trainer_toys import Regression, RegressionDataset, arguments
from tunesmith import Trainer
from tunesmith.cli.main import explain
from tunesmith.errors import WorkerError

BAD_ROW = 13


class Faulty(RegressionDataset):
    """Rows of which one ends the worker that reads it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == BAD_ROW and get_worker_info() is not None:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "hangs":
                time.sleep(600)
            else:
                raise KeyError("no such column")
        return super().__getitem__(i)


class Hurried(Trainer):
    worker_timeout = 3.0


SAID = {
    "killed": r"data-loader worker [01] \(process \d+\) was killed by signal (SIGKILL|Killed)",
    "fails": r"data-loader worker [01] failed",
    "hangs": r"data-loader worker [01] \(process \d+\) gave nothing for 3 s",
}


def make(folder: Path, how: str, **options: Any) -> Trainer:
    given = {"dataloader_num_workers": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, **options}
    return Hurried(Regression(), arguments(folder, **given), train_dataset=Faulty(how), eval_dataset=Faulty(how))


@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("doing", ["train", "evaluate", "predict"])
def test_the_error_names_the_worker_and_the_rows_it_was_reading(tmp_path: Path, how: str, doing: str) -> None:
    trainer = make(tmp_path, how)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=SAID[how]) as caught:
        trainer.predict(trainer.eval_dataset) if doing == "predict" else getattr(trainer, doing)()
    assert time.monotonic() - began < patient(20)
    line = str(caught.value)
    assert "\n" not in line
    shown = line.split("reading rows ")[1].split(".")[0].split(":")[0]
    assert str(BAD_ROW) in shown.replace(" or ", ", ").split(", ")
    assert ("no such column" in line) == (how == "fails")
    assert "dataloader_num_workers=0" in line
    assert explain(caught.value) == (7, f"error: {line}")
    assert multiprocessing.active_children() == []


def test_a_worker_of_a_loader_that_the_user_made_is_named_too(tmp_path: Path) -> None:
    class Own(Hurried):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=4, num_workers=1)

    trainer = Own(Regression(), arguments(tmp_path), train_dataset=Faulty("killed"))
    with pytest.raises(
        WorkerError, match=r"data-loader worker 0 \(process \d+\) was killed .* reading batch [23]( or 3)?"
    ):
        trainer.train()


def test_without_workers_an_error_in_the_data_stays_what_it_is(tmp_path: Path) -> None:
    class Plain(RegressionDataset):
        def __getitem__(self, i: int) -> dict[str, Any]:
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        Trainer(Regression(), arguments(tmp_path), train_dataset=Plain()).train()


def test_a_run_that_lost_a_worker_goes_on_from_its_last_checkpoint_and_ends_the_same(tmp_path: Path) -> None:
    options = {"save_steps": 1, "num_train_epochs": 1, "dataloader_num_workers": 2}
    whole = Trainer(Regression(), arguments(tmp_path / "1", **options), train_dataset=RegressionDataset())
    whole.train()
    with pytest.raises(WorkerError):
        make(tmp_path / "2", "killed", save_steps=1, num_train_epochs=1, per_device_train_batch_size=8).train()
    again = Trainer(Regression(), arguments(tmp_path / "2", **options), train_dataset=RegressionDataset())
    steps = len(list((tmp_path / "2").glob("checkpoint-*")))
    again.train(resume_from_checkpoint=bool(steps) or None)
    assert again.model.a.item() == whole.model.a.item()
    assert again.model.b.item() == whole.model.b.item()
