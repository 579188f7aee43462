"""Searches shared by processes, some of which are killed: every trial counts once, with the values of an uninterrupted search."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from patience import patient
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.config.load import load_config, read_duration
from tunesmith.errors import ConfigError
from tunesmith.runs.event_log import read_journal
from tunesmith.tuning import trials
from tunesmith.tuning.search import START_UP, JournalLock, SearchPlan, TrialStore, Vary, read_space
from tunesmith.tuning.trials import Clock, TimeUp


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("search")
    model = save_tiny_bert(home / "model")
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(40)]
    files = ["--train_file", write_csv(home / "rows.csv", rows), "--model_name_or_path", model]
    files += ["--cache_dir", home / "cache", "--use_cpu", "--disable_tqdm", "--max_steps", "4", "--recipe", "hf"]
    files += ["--validation_split_fraction", "0.5", "--train_sample_size", "0", "--metric_for_best_model", "loss"]
    vary = ["--vary", "learning_rate=1e-3..1e-1", "per_device_train_batch_size=2,4"]
    return ["search", *map(str, files), *vary, "--no_prune", "--trials", "5"]


def table(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "search.json").read_text())
    return found


def what(folder: Path) -> list[Any]:
    return [[one[k] for k in ("number", "state", "value", "options")] for one in table(folder)["trials"]]


def test_killed_workers_lose_nothing_and_nothing_counts_twice(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--output_dir", str(tmp_path / "whole")]) == 0
    command = [sys.executable, "-m", "tunesmith", *words, "--output_dir", str(tmp_path / "shared")]
    faults = ["step.end:kill:2", "step.end:kill:6", None]
    workers = [
        subprocess.Popen(
            command,
            env=os.environ | ({"TUNESMITH_FAULT": fault} if fault else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for fault in faults
    ]
    ends = [(worker.communicate(timeout=patient(120)), worker.returncode) for worker in workers]
    assert ends[2][1] == 0, ends[2][0]
    assert ends[0][1] == -signal.SIGKILL
    assert what(tmp_path / "shared") == what(tmp_path / "whole")
    assert [one["number"] for one in table(tmp_path / "shared")["trials"]] == [0, 1, 2, 3, 4]
    assert table(tmp_path / "shared")["best"] == table(tmp_path / "whole")["best"]
    models = [path.parent.name for path in (tmp_path / "shared").glob("*/model")]
    assert models == [f"trial-{table(tmp_path / 'shared')['best']}"]
    # Trials are ordinary runs, and the same command has nothing left to do.
    first, other = (tmp_path / "shared" / f"trial-{n}" for n in (0, 1))
    assert main(["compare", str(first), str(other)]) == 0
    assert main(["report", str(other)]) == 0
    assert main(["report", str(tmp_path / "shared")]) == 0
    assert (tmp_path / "shared" / models[0] / "report.html").is_file()
    assert main(["predict", str(tmp_path / "shared"), "--text", "a good film"]) == 0
    before = table(tmp_path / "shared")["trials"]
    assert main([*words, "--output_dir", str(tmp_path / "shared")]) == 0
    assert table(tmp_path / "shared")["trials"] == before


def test_time_budget_ends_a_resumable_search(words: list[str], tmp_path: Path) -> None:
    given = [*words, "--output_dir", str(tmp_path / "s"), "--trials", "2"]
    assert main([*given, "--time_budget", "0.05s"]) == 0
    assert not table(tmp_path / "s")["finished"]
    assert main([*given, "--time_budget", "1h"]) == 0
    assert [one["state"] for one in table(tmp_path / "s")["trials"]] == ["complete", "complete"]
    assert main([*given, "--time_budget", "1h", "--learning_rate", "1e-3"]) == 5
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    assert main([*words, "--output_dir", str(tmp_path / "other")]) == 4
    assert read_journal(tmp_path / "s" / "trial-0" / "journal.jsonl")


def test_search_space_is_validated_first() -> None:
    config = load_config(None, {"train_file": "x.csv", "learning_rate": 1e-4})
    assert "learning_rate" not in [v.name for v in read_space([], config)]
    short = load_config(None, {"train_file": "x.csv", "max_steps": 10})
    assert "num_train_epochs" not in [v.name for v in read_space([], short)]
    with pytest.raises(ConfigError) as caught:
        read_space(["learning_rat=1..2", "seeds=2,3", "pooling=mean..first", "optim", "seed=5..1"], config)
    assert len(caught.value.problems) == 5
    found = read_space(["learning_rate=1e-5..1e-3", "seed=1..5", "pooling=mean,first"], config)
    assert [(v.log, v.whole, v.values) for v in found] == [
        (True, False, ()),
        (False, True, ()),
        (False, False, ("mean", "first")),
    ]
    assert [read_duration(text) for text in ("90s", "20m", "2h", "1h30m", "45")] == [90, 1200, 7200, 5400, 45]
    with pytest.raises(ConfigError, match="is not a length of time"):
        load_config(None, {"train_file": "x.csv", "time_budget": "soon"})


def test_partial_line_from_full_disk_is_removed(tmp_path: Path) -> None:
    journal = tmp_path / "search.journal"
    journal.write_bytes(b'{"a": 1}\n{"b"')
    lock = JournalLock(journal)
    assert lock.acquire()
    lock.release()
    assert journal.read_bytes() == b'{"a": 1}\n'


@pytest.fixture(scope="module")
def finished(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a search with two trials, for copying."""
    folder = tmp_path_factory.mktemp("finished") / "search"
    assert main([*words, "--trials", "2", "--output_dir", str(folder)]) == 0
    return folder


def test_search_with_changed_inputs_is_refused(words: list[str], tmp_path: Path, capsys: Any) -> None:
    data, model = tmp_path / "rows.csv", tmp_path / "model"
    data.write_text(Path(words[words.index("--train_file") + 1]).read_text())
    shutil.copytree(words[words.index("--model_name_or_path") + 1], model)
    command = [
        *words,
        "--train_file",
        str(data),
        "--model_name_or_path",
        str(model),
        "--tokenizer_name",
        str(tmp_path / "words"),
        "--output_dir",
        str(tmp_path / "s"),
    ]
    shutil.copytree(model, tmp_path / "words")
    assert main([*command, "--trials", "1"]) == 0
    text = data.read_text()
    data.write_text(text.replace(",good", ",?").replace(",bad", ",good").replace(",?", ",bad"))
    assert main([*command, "--trials", "2"]) == 5
    assert "data changed since the first trial" in capsys.readouterr().err
    data.write_text(text)
    file = tmp_path / "words" / "tokenizer.json"
    words_before = file.read_text()
    file.write_text(words_before.replace('"lowercase": true', '"lowercase": false'))
    assert main([*command, "--trials", "2"]) == 5
    assert "the tokenizer changed since the first trial" in capsys.readouterr().err
    file.write_text(words_before)
    save_tiny_bert(model, seed=7)
    assert main([*command, "--trials", "2"]) == 5
    assert "the base model changed since the first trial" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "noise", "list", "operation", "score", "options", "no study", "clock"])
def test_damaged_search_file_is_reported_by_name(
    words: list[str], finished: Path, tmp_path: Path, damage: str, capsys: Any
) -> None:
    shutil.copytree(finished, tmp_path / "s")
    journal = tmp_path / "s" / "search.journal"
    lines = journal.read_text().splitlines(keepends=True)
    changed = {
        "cut": [*lines[:1], lines[1][: len(lines[1]) // 2] + "\n", *lines[2:]],
        "noise": [*lines[:2], "\x00\x01\n", *lines[2:]],
        "list": [*lines[:2], "[1]\n", *lines[2:]],
        "operation": [*lines[:2], '{"op_code": 99}\n', *lines[2:]],
        "score": [re.sub(r'"values":\[.*?\]', '"values":"x"', line) for line in lines],
        "options": [line for line in lines if '"user_attr":{"options":{"' not in line],
        "no study": lines[1:],
    }
    if damage == "clock":
        (tmp_path / "s" / "clock.json").write_text("")
    else:
        journal.write_text("".join(changed[damage]))
    assert main([*words, "--trials", "2", "--output_dir", str(tmp_path / "s")]) == 5
    named = {"clock": "clock.json", "no study": "search.journal", "cut": "search.journal: line 2"}
    named |= {what: f"search.journal: lacks the {what} of trial" for what in ("score", "options")}
    assert named.get(damage, "search.journal: line 3 is damaged") in capsys.readouterr().err


def test_removed_trial_folder_is_reported_by_name(
    words: list[str], finished: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(finished, tmp_path / "s")
    best = tmp_path / "s" / f"trial-{table(finished)['best']}"
    shutil.rmtree(best)
    assert main([*words, "--trials", "2", "--output_dir", str(tmp_path / "s")]) == 5
    assert best.name in capsys.readouterr().err


def test_clock_counts_parallel_processes_once_without_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, wall = [100.0], [1e9]
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: wall[0]))
    one, other = (Clock(tmp_path / "clock.json", 30.0) for _ in range(2))
    for _ in range(10):
        now[0] += 1
        wall[0] -= 86_400  # a changed system time has no effect
        one.beat()
        other.beat()
    other.save()
    now[0] += 1000
    later = Clock(tmp_path / "clock.json", 30.0)
    assert later.spent() == pytest.approx(10.0)
    now[0] += 15
    later.beat()
    now[0] += 6
    with pytest.raises(TimeUp):
        later.beat()


def test_stray_files_in_a_search_folder_are_ignored(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
        (folder / name).write_bytes(b"\0")
    command = [*words, "--trials", "1", "--output_dir", str(folder)]
    assert main(command) == 0
    for name in (".nfs0001", "notes.txt", "trial-notes.txt", "locks/.DS_Store", "trial-0/Thumbs.db"):
        (folder / name).write_bytes(b"\0")
    (folder / "trial-old").mkdir()
    assert main(command) == 0
    assert [one["state"] for one in table(folder)["trials"]] == ["complete"]


def test_later_trials_are_sampled_near_good_ones(tmp_path: Path) -> None:
    space = (Vary("learning_rate", low=1e-6, high=1e-2),)
    store = TrialStore(tmp_path, SearchPlan(space, 25), {"search": "made up"}, seed=0)
    pruned = 0
    while (one := store.claim()) is not None:
        rng = np.random.default_rng(one.number)
        final = 0.9 - 0.05 * (math.log10(one.options.get("learning_rate", 1e-5)) + 4) ** 2 + rng.normal(0, 0.01)
        behind = store.report(one, 50, final - 0.1)
        pruned += behind
        store.tell(one, "pruned" if behind else "complete", None if behind else final)
        one.lock.release()
    rates = [record.options["learning_rate"] for record in store.records()[1:]]
    decades = [abs(math.log10(rate) + 4) for rate in rates]
    assert np.mean(decades[START_UP:]) < np.mean(decades[:START_UP])
    assert 1 <= pruned <= 20
