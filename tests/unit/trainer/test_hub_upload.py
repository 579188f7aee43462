"""Uploads: what goes to the Hub and when, with a stand-in for the client."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_toys import PretrainedRegression, Recorder, RegressionConfig, RegressionDataset, arguments
from tunesmith import Trainer
from tunesmith.trainer import uploads


class Client:
    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.uploads: list[dict[str, Any]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        self.made.append({"name": name, **options})
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, **options: Any) -> Any:
        self.uploads.append({**options, "files": sorted(p.name for p in Path(options["folder_path"]).iterdir())})
        done: Future[str] = Future()
        done.set_result("commit")
        return done if options["run_as_future"] else "commit"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(uploads, "_api", lambda: made)
    return made


def make(folder: Path, **options: Any) -> Any:
    defaults = {"push_to_hub": True, "hub_token": "secret", "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    return Trainer(
        PretrainedRegression(RegressionConfig()),
        arguments(folder, **{**defaults, **options}),
        train_dataset=RegressionDataset(),
        callbacks=[Recorder],
    )


def test_push_to_hub_uploads_model_and_card_and_no_checkpoints(tmp_path: Path, client: Client) -> None:
    trainer = make(tmp_path / "line", hub_strategy="end")
    trainer.train()
    assert client.uploads == []
    assert trainer.push_to_hub(commit_message="done", tags=["toy"]) == "commit"
    (upload,) = client.uploads
    assert client.made[0]["name"] == "line"
    assert upload["repo_id"] == "me/line"
    assert upload["commit_message"] == "done"
    assert {"README.md", "model.safetensors", "config.json"} <= set(upload["files"])
    assert "checkpoint-*" in upload["ignore_patterns"]
    assert "secret" not in (tmp_path / "line" / "training_args.json").read_text()
    assert "- toy" in (tmp_path / "line" / "README.md").read_text()


@pytest.mark.parametrize(("strategy", "places"), [("every_save", [None]), ("checkpoint", [None, "last-checkpoint"])])
def test_checkpoints_are_uploaded_while_training(tmp_path: Path, client: Client, strategy: str, places: Any) -> None:
    trainer = make(tmp_path / "line", hub_strategy=strategy)
    trainer.train()
    assert [u["path_in_repo"] for u in client.uploads] == places * 2
    assert client.uploads[0]["commit_message"] == "Training in progress, step 4"
    assert "optimizer.safetensors" in client.uploads[0]["ignore_patterns"]
    recorder = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorder))
    assert recorder.events.count("on_push_begin") == 2


def test_save_model_pushes_too(tmp_path: Path, client: Client) -> None:
    make(tmp_path / "line").save_model()
    assert [u["commit_message"] for u in client.uploads] == ["Model save"]
