"""Row 14: data, tokenizer, model, config or code changes between a stop and a resume, or before a load.

Every change is refused by name (exit 5) or reported if only the user can judge it; none is accepted silently. Changes without
effect are not refused.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from sampling import crossed
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.errors import CheckpointError, ConfigError, TunesmithError
from tunesmith.events import Event, Saved
from tunesmith.pipeline.train import RunObserver, finetune
from tunesmith.runs.folder import MANIFEST, RunDir

Change = Callable[[Path, dict[str, Any]], None]
SPLITS = ("train", "validation", "test")
OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "train_sample_size": 0,
    "load_best_model_at_end": True,
    "save_strategy": "steps",
    "save_steps": 4,
    "class_weights": (1.0, 2.0),
    "lr_scheduler_type": "polynomial",
}


class Stopped(Exception):
    """Raised to stop a run as if it were killed."""


def train_until(step: int, **options: Any) -> bytes:
    """Return a callback that stops after the checkpoint of a step."""

    def stop(event: Event) -> None:
        if isinstance(event, Saved) and event.step == step:
            raise Stopped

    with pytest.raises(Stopped):
        finetune(observer=RunObserver(listeners=[stop]), **options)
    return (RunDir(options["output_dir"]).checkpoint(step) / "model.safetensors").read_bytes()


def files_of(world: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": world / "base",
        "output_dir": world / "run",
        "cache_dir": world / "cache",
        **{f"{split}_file": world / f"{split}.csv" for split in SPLITS},
    }


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model, three files and a 12-step run that was stopped after a checkpoint in the middle."""
    world = tmp_path_factory.mktemp("stopped")
    save_tiny_bert(world / "base")
    for split, (count, seed) in {"train": (48, 0), "validation": (12, 1), "test": (8, 2)}.items():
        rows = [
            {"text": t, "label": "good" if g else "bad", "note": i} for i, (t, g) in enumerate(sentences(count, seed))
        ]
        write_csv(world / f"{split}.csv", rows)
    train_until(4, **files_of(world), **OPTIONS)
    return world


@pytest.fixture
def world(stopped: Path, tmp_path: Path) -> Path:
    """Return a copy in a different folder."""
    for name in ("base", "train.csv", "validation.csv", "test.csv", "run"):
        place = tmp_path / "world" / name
        shutil.copytree(stopped / name, place) if (stopped / name).is_dir() else shutil.copy2(stopped / name, place)
    (tmp_path / "world" / "cache").symlink_to(stopped / "cache")
    return tmp_path / "world"


def edit(name: str, old: str, new: str, count: int = 1) -> Change:
    """Return a function that replaces existing text in a file."""

    def change(world: Path, options: dict[str, Any]) -> None:
        text = (world / name).read_text()
        assert old in text, (name, old)
        (world / name).write_text(text.replace(old, new, count))

    return change


def option(**given: Any) -> Change:
    return lambda world, options: options.update(given)


def rows_of(split: str, alter: Callable[[list[str]], list[str]], *, keep_times: bool = False) -> Change:
    """Return a function that changes the lines after the header; `keep_times` preserves size and mtime."""

    def change(world: Path, options: dict[str, Any]) -> None:
        file = world / f"{split}.csv"
        before = file.stat()
        head, *lines = file.read_bytes().decode().split("\r\n")[:-1]
        altered = alter(lines)
        assert altered != lines
        file.write_bytes("".join(f"{line}\r\n" for line in [head, *altered]).encode())
        if keep_times:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    return change


def relabel(lines: list[str]) -> list[str]:
    text, label, note = lines[7].split(",")
    return [*lines[:7], f"{text},{'bad' if label == 'good' else 'good'},{note}", *lines[8:]]


def reword(lines: list[str]) -> list[str]:
    at = next(i for i, line in enumerate(lines) if "film" in line)
    return [line.replace("film", "book", 1) if i == at else line for i, line in enumerate(lines)]


def edit_json(name: str, alter: Callable[[dict[str, Any]], Any]) -> Change:
    def change(world: Path, options: dict[str, Any]) -> None:
        file = world / name
        data = json.loads(file.read_text())
        alter(data)
        file.write_text(json.dumps(data))

    return change


def swap_ids(data: dict[str, Any]) -> None:
    words = data["model"]["vocab"]
    words["good"], words["bad"] = words["bad"], words["good"]


def flip_bit(name: str, *, at: int = -40) -> Change:
    """Return a function that flips a bit in place and restores the mtime."""

    def change(world: Path, options: dict[str, Any]) -> None:
        file = world / name
        before = file.stat()
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        with file.open("r+b") as handle:
            handle.write(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    return change


def link_elsewhere(world: Path, options: dict[str, Any]) -> None:
    """Make the data file a link to a different file."""
    lines = (world / "train.csv").read_text().splitlines()
    (world / "other.csv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    (world / "train.csv").unlink()
    (world / "train.csv").symlink_to(world / "other.csv")


def other_tokenizer(world: Path, options: dict[str, Any]) -> None:
    shutil.copytree(world / "base", world / "tokenizer")
    edit_json("tokenizer/tokenizer.json", swap_ids)(world, options)
    options["tokenizer_name"] = str(world / "tokenizer")


def other_head(world: Path, options: dict[str, Any]) -> None:
    """Use a base model that was trained for the same labels in reverse order."""
    save_tiny_bert(world / "base", labels=("good", "bad"))


def all_files(old: str, new: str) -> Change:
    """Return a function that replaces text in all three files."""
    return lambda world, options: [edit(f"{s}.csv", old, new)(world, options) for s in SPLITS] and None


def swap_rows(rows: list[str]) -> list[str]:
    return [rows[1], rows[0], *rows[2:]]


def add_token(data: dict[str, Any]) -> None:
    data["added_tokens"].append({**data["added_tokens"][0], "id": 6, "content": "fine", "special": False})


TRAIN, TOKENIZER = "the training data changed", "the tokenizer changed"
CONFIG, WEIGHTS = "the config of the base model changed", "the weights of the base model changed"
SETTINGS: dict[str, Any] = {
    "max_train_samples": 40, "max_seq_length": 8, "seed": 43, "data_seed": 1, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2, "num_train_epochs": 3, "learning_rate": 2e-3, "warmup_steps": 2,
    "optim": "adamw_torch", "weight_decay": 0.01, "adam_beta2": 0.99,
    "adam_epsilon": 1e-6, "max_grad_norm": 0.5, "label_smoothing_factor": 0.1, "adversarial": 0.02,
    "class_weights": (2.0, 1.0), "bf16": True, "train_sampling_strategy": "random",
    "freeze": ("embeddings",), "layerwise_lr_decay": 0.8,
    "metric_for_best_model": "loss", "early_stopping_patience": 1, "label_names": ("good", "bad"),
}  # fmt: skip
TOKENIZER_SETTINGS: dict[str, Any] = {
    "do_lower_case": False, "truncation_side": "left", "padding_side": "left", "pad_token": "[MASK]",
    "model_max_length": 9, "model_input_names": ["input_ids", "attention_mask"],
}  # fmt: skip


def setting(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update({name: value})


def shown(value: Any) -> str:
    return re.escape(repr(value)) if isinstance(value, (int, float, str)) else ""


RESUMED: dict[str, tuple[Change, str]] = {
    "one word of a row": (rows_of("train", reword), TRAIN),
    "one label flipped": (rows_of("train", relabel), TRAIN),
    "two rows swapped": (rows_of("train", swap_rows), TRAIN),
    "same size and mtime": (rows_of("train", swap_rows, keep_times=True), TRAIN),
    "four rows dropped": (rows_of("train", lambda rows: rows[:-4]), TRAIN),
    "a row added": (rows_of("train", lambda rows: [*rows, "a fine day,good,99"]), TRAIN),
    "a row twice": (rows_of("train", lambda rows: [*rows, rows[0]]), TRAIN),
    "text column renamed": (edit("train.csv", "text,", "sentence,"), "text|sentence"),
    "label column renamed": (all_files("label", "class"), "columns was"),
    "link to different rows": (link_elsewhere, TRAIN),
    "validation row": (rows_of("validation", reword), "the validation data changed"),
    "validation label": (rows_of("validation", relabel), "the validation data changed"),
    "test row": (rows_of("test", reword), "the test data changed"),
    "test file gone": (lambda w, o: o.pop("test_file") and None, "the test data changed"),
    "tokenizer.json: ids swapped": (edit_json("base/tokenizer.json", swap_ids), TOKENIZER),
    "tokenizer.json: no lower case": (
        edit_json("base/tokenizer.json", lambda d: d["normalizer"].update(lowercase=False)),
        "tokenizer.json changed",
    ),
    "tokenizer.json: a token added": (edit_json("base/tokenizer.json", add_token), TOKENIZER),
    **{
        f"tokenizer_config: {name}": (edit_json("base/tokenizer_config.json", setting(name, value)), TOKENIZER)
        for name, value in TOKENIZER_SETTINGS.items()
    },
    "--tokenizer_name": (other_tokenizer, TOKENIZER),
    "config.json: dropout": (edit_json("base/config.json", setting("hidden_dropout_prob", 0.2)), CONFIG),
    "config.json: activation": (edit_json("base/config.json", setting("hidden_act", "relu")), CONFIG),
    "base weights: one bit": (flip_bit("base/model.safetensors"), WEIGHTS),
    "base model: different seed": (lambda w, o: save_tiny_bert(w / "base", seed=3) and None, WEIGHTS),
    "base model: label order": (other_head, "the labels were|label"),
    "schedule": (option(lr_scheduler_type="linear"), "lr_scheduler_type was"),
    **{name: (option(**{name: value}), f"{name} was .* and is {shown(value)}") for name, value in SETTINGS.items()},
}


@pytest.mark.parametrize("kind", RESUMED)
def test_change_before_a_resume_is_refused_and_named(kind: str, world: Path) -> None:
    options = {**files_of(world), **OPTIONS}
    change, says = RESUMED[kind]
    change(world, options)
    before = (world / "run" / "journal.jsonl").read_bytes()
    with pytest.raises(TunesmithError, match=says) as caught:
        finetune(**options)
    assert caught.value.exit_code == 5 or kind in ("text column renamed", "base model: label order")
    assert (world / "run" / "journal.jsonl").read_bytes() == before


def test_harmless_change_is_accepted(world: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "base", world / "same")
    for file in (world / "base" / "README.md", world / "base" / "generation_config.json", world / "base" / "notes.txt"):
        file.write_text('{"max_length": 5}')
    edit_json("base/config.json", lambda d: d.update(_name_or_path="elsewhere", transformers_version="9.9"))(world, {})
    (world / "train.csv").rename(world / "moved.csv")
    text = (world / "moved.csv").read_text()
    (world / "moved.csv").write_text(text.replace(",1\n", ",one\n"), encoding="utf-8-sig", newline="\r\n")
    options = {**files_of(world), **OPTIONS, "train_file": world / "moved.csv", "tokenizer_name": str(world / "same")}
    whole = train_until(8, **{**files_of(stopped), **OPTIONS, "output_dir": tmp_path / "whole"})
    assert train_until(8, **options, logging_steps=3, save_total_limit=2) == whole


def test_allowed_change_is_recorded(world: Path) -> None:
    edit_json("base/tokenizer.json", swap_ids)(world, {})
    train_until(8, **files_of(world), **OPTIONS, allow_changed_data=True)
    assert "resumes although the tokenizer changed" in (world / "run" / "journal.jsonl").read_text()


@pytest.fixture(scope="module")
def finished(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run, finished."""
    place = tmp_path_factory.mktemp("finished")
    finetune(**{**files_of(stopped), **OPTIONS, "output_dir": place / "run"})
    shutil.copy2(stopped / "test.csv", place / "test.csv")
    return place


def without(name: str) -> Change:
    return lambda world, options: (world / name).unlink()


def with_file(name: str, text: str) -> Change:
    return lambda world, options: (world / name).write_text(text) and None


def swap_labels(data: dict[str, Any]) -> None:
    data["id2label"] = {"0": data["id2label"]["1"], "1": data["id2label"]["0"]}


LOADED: dict[str, Change] = {
    "weights: one bit": flip_bit("model.safetensors"),
    "weights: a bit of the header": flip_bit("model.safetensors", at=30),
    "weights cut": lambda w, o: os.truncate(w / "model.safetensors", 5000),
    "weights of a different run": lambda w, o: save_tiny_bert(w, seed=5, labels=("bad", "good")) and None,
    "config: label names swapped": edit_json("config.json", swap_labels),
    "config: activation": edit_json("config.json", lambda d: d.update(hidden_act="relu")),
    "facts: label names swapped": edit_json("tunesmith.json", lambda d: d["labels"]["names"].reverse()),
    "facts: rows cut": edit_json("tunesmith.json", lambda d: d.update(max_length=4)),
    "tokenizer: ids swapped": edit_json("tokenizer.json", swap_ids),
    "tokenizer_config": edit_json("tokenizer_config.json", lambda d: d.update(truncation_side="left")),
    "tokens added": with_file("added_tokens.json", '{"fine": 6}'),
    "an adapter added": with_file("adapter_config.json", "{}"),
    "weights added": with_file("model.safetensors.index.json", "{}"),
    "config gone": without("config.json"),
    "manifest gone": without(MANIFEST),
    "manifest edited": edit_json(MANIFEST, lambda d: d["files"].pop("tokenizer.json")),
}


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(finished / "run", tmp_path / "run")
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize(("kind", "part"), crossed(LOADED, ["model", "checkpoint"]))
def test_changed_model_is_not_used(
    kind: str, part: str, run: RunDir, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tunesmith.inference.predictor import Predictor
    from tunesmith.inference.service import PredictionService

    folder = run.model if part == "model" else run.checkpoints()[-1]
    LOADED[kind](folder, {})
    given = str(run.path if part == "model" else folder)
    assert main(["predict", given, "--text", "good film", "--use_cpu"]) == 5
    assert str(folder) in capsys.readouterr().err
    assert main(["evaluate", given, "--test_file", str(finished / "test.csv"), "--use_cpu"]) == 5
    with pytest.raises(CheckpointError):
        Predictor.load(given, use_cpu=True)
    if part == "model":
        with pytest.raises(TunesmithError) as caught:
            PredictionService(run.path)
        assert isinstance(caught.value, CheckpointError)


def test_changed_checkpoint_is_not_used(run: RunDir, finished: Path, stopped: Path) -> None:
    checkpoint = run.checkpoints()[-1]
    flip_bit(f"{checkpoint.name}/model.safetensors")(run.path, {})
    assert main(["predict", str(checkpoint), "--text", "good film", "--use_cpu"]) == 5
    options = {**files_of(stopped), **OPTIONS, "model_name_or_path": checkpoint, "output_dir": run.path / "next"}
    with pytest.raises(CheckpointError, match="sha256 differs"):
        finetune(**options)
    assert not (run.path / "next").exists()


def test_model_without_manifest_is_used_with_a_note(
    tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_bert(tmp_path / "plain", labels=("bad", "good"))
    assert main(["predict", str(tmp_path / "plain"), "--text", "good film", "--use_cpu"]) == 0
    assert f"has no {MANIFEST}, so its files are not verified" in capsys.readouterr().err
    for name, text in {"README.md": "mine", "generation_config.json": "{}", "notes.txt": "mine"}.items():
        (run.model / name).write_text(text)
    assert main(["predict", str(run.path), "--text", "good film", "--use_cpu"]) == 0
    assert "note" not in capsys.readouterr().err


def test_model_changed_while_served_is_not_used(run: RunDir) -> None:
    from tunesmith.inference.service import LiveModel

    problems: queue.Queue[str | None] = queue.Queue()
    served = LiveModel(run.model, on_reload=problems.put)
    model = served.get()
    before = model.probabilities(["the good film"]).tolist()
    file = run.model / "model.safetensors"
    whole = file.read_bytes()
    flip_bit("model.safetensors", at=-400)(run.model, {})
    assert served.get().probabilities(["the good film"]).tolist() == before, "a loaded model depends on its file"
    assert "sha256 differs" in (problems.get(timeout=patient(60)) or "")
    assert served.get() is model
    file.write_bytes(whole)
    served.get()
    assert problems.get(timeout=patient(60)) is None
    assert served.get() is not model
    shutil.rmtree(run.model)
    assert served.get().probabilities(["the good film"]).tolist() == before
    with pytest.raises(ConfigError):
        LiveModel(run.model).get()


def test_files_swapped_during_loading_are_noticed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from tunesmith.inference import torch_network
    from tunesmith.inference.predictor import Predictor

    load = torch_network.load_tokenizer

    def swap_then_load(folder: Path) -> Any:
        edit_json("config.json", swap_labels)(run.model, {})
        return load(folder)

    monkeypatch.setattr(torch_network, "load_tokenizer", swap_then_load)
    with pytest.raises(CheckpointError):
        Predictor.load(run.path, use_cpu=True)
