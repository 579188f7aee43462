"""Files of a run folder, including runs that run out of memory or lose their folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.optim import adam
from transformers.models.bert.modeling_bert import BertModel

from read_predictions import read_predictions
from tiny_model import mood, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.data.rows import read_prediction_columns
from tunesmith.errors import CheckpointError, DataError, ResourceError
from tunesmith.events import Event, Note, StepDone
from tunesmith.pipeline.results import RunResult
from tunesmith.pipeline.train import RunObserver, finetune
from tunesmith.report.predictions import make_predictions
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir

ROWS = mood()


def train_rows(folder: Path, tiny: Path, cache: Path, **options: Any) -> RunResult:
    defaults = {"use_cpu": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "train_sample_size": 8}
    where = {"model_name_or_path": tiny, "output_dir": folder, "cache_dir": cache}
    return finetune(train_data=ROWS, **where, **{**defaults, **options})


@pytest.mark.parametrize(
    ("how", "save_strategy"),
    [*((how, "steps") for how in ("removed", "linked", "made again")), ("journal removed", "no")],
)
def test_removed_run_folder_ends_the_run(how: str, save_strategy: str, tiny: Path, cache: Path, tmp_path: Path) -> None:
    run, steps = tmp_path / "run", []
    (tmp_path / "mine").mkdir()

    def swap(event: Event) -> None:
        if not isinstance(event, StepDone):
            return
        steps.append(event.step)
        if event.step != 1:
            return
        if how == "journal removed":
            (run / "journal.jsonl").unlink()
            return
        shutil.rmtree(run) if how == "removed" else os.rename(run, tmp_path / "moved")
        if how == "linked":
            run.symlink_to(tmp_path / "mine")
        elif how == "made again":
            run.mkdir()

    options: dict[str, Any] = {"save_strategy": save_strategy, "eval_strategy": "no"}
    with pytest.raises(ResourceError, match="was removed, renamed or replaced while the run wrote to it") as caught:
        train_rows(run, tiny, cache, observer=RunObserver(listeners=[swap]), **options)
    assert caught.value.exit_code == 4
    assert steps == ([1, 2] if save_strategy == "steps" else [1, 2, 3, 4])
    assert list((tmp_path / "mine").iterdir()) == []
    assert how != "removed" or not run.exists()


def test_any_run_name_has_a_valid_model_card(tiny: Path, cache: Path, tmp_path: Path) -> None:
    name = 'line\nbreak: "quoted" \\ | <b>\u2028\x85---\n---'
    result = train_rows(tmp_path / "run", tiny, cache, max_steps=1, run_name=name)
    front, body = result.run.card_file.read_text().removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["model-index"][0]["name"] == name
    assert body.splitlines()[1] == '# line break: "quoted" \\ \\| &lt;b> --- ---'


def files(folder: Path, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    rows = mood()
    more = [{"text": text, "label": "good"} for text in extra]
    train, validation = write_csv(folder / "train.csv", rows), write_csv(folder / "validation.csv", rows[:6] + more)
    return {"train_file": train, "validation_file": validation}


def fail_in_step_3(train: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = adam.adam, [0]

    def fail(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 6:  # the second group of step 3
            raise torch.OutOfMemoryError("no memory, as the test asked")
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(adam, "adam", fail)
        with pytest.raises(ResourceError, match=r"update of step 3.*last checkpoint: checkpoint-2"):
            train(**options)


def test_out_of_memory_in_an_update_resumes_exactly(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**files(tmp_path), "save_strategy": "steps", "save_steps": 1, "weight_decay": 0.1, "max_steps": 4}
    options["recipe"] = "hf"  # two groups: with and without decay
    whole, _ = train(**options, output_dir=tmp_path / "whole")
    fail_in_step_3(train, options, monkeypatch)
    again, _ = train(**options)
    expected, got = (load_file(r.run.model / "model.safetensors") for r in (whole, again))
    assert all(torch.equal(expected[n], got[n]) for n in expected)


def test_row_of_exactly_the_longest_length_is_not_truncated(train: Any, tmp_path: Path) -> None:
    exact, longer = "the film was very good .", "the film was very very good ."
    result, _ = train(**files(tmp_path, (exact, longer)), max_seq_length=8)
    found = read_prediction_columns(result.run.predictions_file)
    cut = dict(zip(found["text"], found["truncated"], strict=True))
    assert (cut[exact], cut[longer]) == (False, True)


def test_run_with_different_setting_gets_next_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": text, "label": "rare" if i % 5 == 0 else "common"} for i, (text, _) in enumerate(sentences(40))]
    rows[3]["text"] = ""
    rows[7]["label"] = "N/A"
    file = write_csv(tmp_path / "tickets.csv", rows)
    said: list[str] = []
    options = {"train_file": file, "model_name_or_path": tiny, "cache_dir": "cache", "use_cpu": True, "max_steps": 1}

    def train(**more: object) -> Path:
        observer = RunObserver(log=said.append)
        return finetune(observer=observer, skip_bad_rows=True, **{**options, **more}).run.path

    assert train() == Path("runs/tickets-tiny")
    bad = [json.loads(line) for line in Path("runs/tickets-tiny/bad_rows.jsonl").read_text().splitlines()]
    assert [row["reasons"] for row in bad] == [["text: the text is empty"], ["label: the label is 'N/A'"]]
    assert "2 of 40 train rows were skipped" in Path("runs/tickets-tiny/README.md").read_text()
    scores = json.loads(Path("runs/tickets-tiny/metrics.json").read_text())["validation"]
    assert (scores["f1"]["of"], scores["accuracy"].get("of")) == ("rare", None)
    assert train(learning_rate=1e-3) == Path("runs/tickets-tiny-2")
    assert "this run is written to runs/tickets-tiny-2" in " ".join(said)
    monkeypatch.setattr("tunesmith.pipeline.train.read_run_data", None)  # the refusal happens before data is read
    with pytest.raises(CheckpointError, match="contains a finished run of this config"):
        train()
    with pytest.raises(CheckpointError, match="contains a finished run of a different config"):
        train(output_dir="runs/tickets-tiny", seed=7)


OURS = ("split", "row", "file", "line", "prediction", "truncated", "prob_good", "label")


@pytest.mark.parametrize("names", [("split", "row"), ("file", "line"), ("prob_good", "label"), ("length", "input_ids")])
def test_text_columns_with_reserved_names_keep_their_text(names: tuple[str, str], train: Any, tmp_path: Path) -> None:
    texts = [text for text, _ in sentences(40)]
    rows = [{names[0]: text, names[1]: text.upper(), "mood": ("good", "bad")[i % 2]} for i, text in enumerate(texts)]
    file = write_csv(tmp_path / "train.csv", rows)
    result, said = train(train_file=file, text_column_names=names, label_column_name="mood", max_steps=1)
    table = read_prediction_columns(result.run.predictions_file)
    assert set(table[names[0]]) <= set(texts)
    assert table[names[1]] == [text.upper() for text in table[names[0]]]
    moved = [f"'tunesmith_{name}' instead of {name!r}" for name in OURS if name in names]
    lines = [line for line in said if "already has columns" in line]
    assert len(lines) == bool(moved)
    assert all(part in lines[0] for part in moved)
    found = make_predictions(table, json.loads(result.run.data_summary_file.read_text()))
    assert found is not None
    assert found.split == "validation"
    assert found.texts == {name: table[name] for name in names}
    assert found.probabilities is not None
    assert set(found.labels.tolist()) <= {0, 1}


def test_predictions_name_the_file_and_line(train: Any, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "train.csv", [{"text": t, "label": "ab"[good]} for t, good in sentences(40)])
    result, _ = train(train_file=file, max_steps=1)
    table = read_prediction_columns(result.run.predictions_file)
    lines = Path(file).read_text().splitlines()
    assert set(table["file"]) == {str(file)}
    places = zip(table["line"], table["text"], table["label"], strict=True)
    assert all(lines[line - 1] == f"{text},{label}" for line, text, label in places)


def test_text_column_named_labels_is_refused(train: Any, tmp_path: Path) -> None:
    rows = [{"labels": text, "mood": "good" if good else "bad"} for text, good in sentences(40)]
    file = write_csv(tmp_path / "train.csv", rows)
    with pytest.raises(DataError, match=r"'labels'.*Rename"):
        train(train_file=file, text_column_names="labels", label_column_name="mood")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_predicting_predictions_again_loses_no_column(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [{"text": text, "prob_good": str(i), "label": "x"} for i, (text, _) in enumerate(sentences(5, 9))]
    file = write_csv(tmp_path / "0.csv", first)
    sizes = []
    for turn in range(1, 4):
        output = tmp_path / f"{turn}.{kind}"
        assert main(["predict", str(trained), "--input", str(file), "--output", str(output), "--use_cpu"]) == 0
        said = capsys.readouterr().err
        assert "'tunesmith_prob_good' instead of 'prob_good'" in said or turn > 1
        file = output
        sizes.append(len(names_in(output)))
    assert sizes == [6, 9, 12]
    assert "tunesmith_prediction_2" in names_in(file)
    assert "'tunesmith_prediction_2' instead of 'prediction'" in said


def names_in(path: Path) -> list[str]:
    return list(json.loads(path.read_text().splitlines()[0]) if path.suffix == ".jsonl" else read_predictions(path))


@pytest.fixture
def causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch transformers so that each token attends only to earlier ones."""
    plain = BertModel._create_attention_masks

    def masks(self: Any, **given: Any) -> Any:
        mask, other = plain(self, **given)
        length = given["embedding_output"].shape[1]
        seen = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        return seen if mask is None else mask & seen, other

    monkeypatch.setattr(BertModel, "_create_attention_masks", masks)


def journal(folder: Path) -> tuple[list[str], list[float | None]]:
    """Return notes and losses of a run."""
    events = read_journal(RunDir(folder).journal_file)
    return [e.text for e in events if isinstance(e, Note)], [e.loss for e in events if isinstance(e, StepDone)]


def test_wrong_speedup_is_disabled_and_logged(train: Any, causal: None, tmp_path: Path) -> None:
    rows = mood()
    file = write_csv(tmp_path / "train.csv", rows)
    options = {"train_file": file, "train_sampling_strategy": "random"}
    fast, _ = train(**options, output_dir=tmp_path / "fast")
    off = {"padding_free": "off", "cls_only_last_layer": "off", "restrict_vocabulary": "off"}
    slow, _ = train(**options, **off, output_dir=tmp_path / "slow")
    notes, losses = journal(fast.run.path)
    assert [note.split(" is off: its results differ from those of the plain step (")[0] for note in notes] == [
        "padding_free"
    ]
    assert losses == pytest.approx(journal(slow.run.path)[1], abs=2e-5)
    assert journal(slow.run.path)[0] == []
