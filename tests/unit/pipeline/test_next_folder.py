"""Which folder a second try gets, and when a finished run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_model import sentences, write_csv
from tunesmith.errors import CheckpointError
from tunesmith.pipeline.identity import choose_folder
from tunesmith.pipeline.train import finetune
from tunesmith.pipeline.watch import Watch


def test_a_second_try_with_another_setting_gets_the_next_folder(
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
        watch = Watch(say=said.append)
        return finetune(watch=watch, skip_bad_rows=True, **{**options, **more}).run.path

    assert train() == Path("runs/tickets-tiny")
    bad = [json.loads(line) for line in Path("runs/tickets-tiny/bad_rows.jsonl").read_text().splitlines()]
    assert [row["reasons"] for row in bad] == [["text: the text is empty"], ["label: the label is 'N/A'"]]
    assert "2 of 40 train rows were skipped" in Path("runs/tickets-tiny/README.md").read_text()
    scores = json.loads(Path("runs/tickets-tiny/metrics.json").read_text())["validation"]
    assert (scores["f1"]["of"], scores["accuracy"].get("of")) == ("rare", None)
    assert train(learning_rate=1e-3) == Path("runs/tickets-tiny-2")
    assert "this run is written to runs/tickets-tiny-2" in " ".join(said)
    monkeypatch.setattr("tunesmith.pipeline.train.read_run_data", None)  # nothing is read before the refusal
    with pytest.raises(CheckpointError, match="contains a finished run of this config"):
        train()
    with pytest.raises(CheckpointError, match="contains a finished run of a different config"):
        train(output_dir="runs/tickets-tiny", seed=7)


def test_a_folder_that_is_free_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tunesmith.config.options import RunConfig

    monkeypatch.chdir(tmp_path)
    config = RunConfig(train_file="x.csv")
    assert choose_folder(config) == (config, None)
