"""`tunesmith bench`: real processes that take turns, a table that adds up, a contestant that dies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tiny_model import save_tiny_bert
from tunesmith.cli.main import main
from tunesmith.errors import WorkerError
from tunesmith.measure import contest
from tunesmith.measure.contest import CONTESTANTS, Contestant, Result, Turn, kinds_for, run_contest
from tunesmith.measure.table import failures_of, format_lines, make_lines
from warm import warm_python


def write_rows(path: Path) -> Path:
    lines = ["text,label"] + [f"the {'good' if i % 2 else 'bad'} film number {i},{i % 2}" for i in range(60)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_trainer_beside_us_on_the_users_own_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    model, rows = save_tiny_bert(tmp_path / "tiny"), write_rows(tmp_path / "rows.csv")
    words = ["bench", "--train_file", str(rows), "--model_name_or_path", str(model), "--against", "trainer"]
    more = ["--rounds", "2", "--steps", "3", "--use_cpu", "--per_device_train_batch_size", "4"]
    cache = ["--cache_dir", str(tmp_path / "cache"), "--json", str(tmp_path / "out.json")]
    assert main([*words, *more, *cache]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "tunesmith" in out
    assert "Trainer, its defaults" in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["name"] for one in found["contestants"]] == ["tunesmith", "Trainer, its defaults"]
    assert all(one["step_ms"] > 0 and one["tokens_per_second"] > one["rows_per_second"] for one in found["contestants"])
    assert all(one["peak_mb"] > 50 and one["start_seconds"] > 0.1 for one in found["contestants"])
    assert all(0 < one["of_copies"] < 5 and 0 < one["of_limit"] < 5 for one in found["contestants"])
    assert found["matrix_rate"] > 1e8
    assert found["copy_rate"] > 1e7
    assert "GB/s copied" in out
    assert found["did_not_run"] == {}
    assert len(found["losses"]) == 14  # 54 training rows by 4
    assert found["largest_loss_difference"] < 1e-5
    assert len({round(ours, 6) for ours, _ in found["losses"]}) > 5, "the losses do not move"


def test_a_contestant_that_dies_is_named_with_its_last_words_and_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "statistics.py").write_text("open('canary', 'w')\nmedian = None\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"plain PyTorch loop ended with 1: .*no\.csv"):
        Contestant("loop", {"train_file": str(tmp_path / "no.csv")}, tmp_path / "loop.log")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["--against", "tunesmith"], ["--against", "keras"], ["--json", "/no/such/out.json"]]
)
def test_wrong_calls_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--train_file", "x.csv", *words]) == 2
    assert "tunesmith: error:" in capsys.readouterr().err


def test_ratios_are_by_rows_and_medians_by_turn() -> None:
    ours = Result("tunesmith", 2.0, [Turn(1.0, 80, 800), Turn(9.0, 80, 800), Turn(1.0, 80, 800)], 10**9)
    theirs = Result("trainer", 3.0, [Turn(2.0, 80, 800)] * 3, 2 * 10**9)
    limits = {"matrix_rate": 800_000.0, "copy_rate": 500.0}
    lines = make_lines([ours, theirs], steps=10, operations=100.0, moved=10.0, **limits)
    assert [line.step_ms for line in lines] == [100.0, 200.0]
    assert [line.ratio for line in lines] == [1.0, 2.0]
    assert [line.of_limit for line in lines] == [0.1, 0.05]
    assert [line.of_copies for line in lines] == [0.1, 0.05]
    text = format_lines(lines).splitlines()
    assert len({len(line) for line in text}) == 1
    assert text[2].split()[-1] == "2.00"


class Stub:
    """A contestant that fails where it is told to."""

    fails: ClassVar[dict[str, str]] = {}

    def __init__(self, kind: str, options: dict[str, Any], log: Path) -> None:
        self.kind, self.result, self.closed = kind, Result(kind, 1.0), False
        self._fail("start")

    def _fail(self, moment: str) -> None:
        if self.fails.get(self.kind) == moment:
            raise WorkerError(f"{CONTESTANTS[self.kind]} ended with 1: RuntimeError: no compiler", where="x.log")

    def take_turn(self, steps: int) -> None:
        self._fail("turn")
        self.result.turns.append(Turn(1.0, 8, 80))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("moment", ["start", "turn"])
def test_a_contestant_that_fails_is_a_line_of_the_table_and_the_others_go_on(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "Contestant", Stub)
    monkeypatch.setattr(Stub, "fails", {"trainer_compiled": moment})
    kinds = ("tunesmith", "trainer_compiled", "loop")
    results = run_contest({}, kinds=kinds, rounds=2, steps=1, folder=tmp_path)
    assert [len(one.turns) for one in results] == [2, 0, 2]
    lines = make_lines(results, steps=1, operations=1.0, moved=1.0, matrix_rate=1.0, copy_rate=1.0)
    assert [line.name for line in lines] == ["tunesmith", "plain PyTorch loop"]
    last = format_lines(lines, failures_of(results)).splitlines()[-1]
    assert last == "Trainer, its best, compiled  did not run: ended with 1: RuntimeError: no compiler"


def test_without_us_there_is_no_contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "Contestant", Stub)
    monkeypatch.setattr(Stub, "fails", {"tunesmith": "start"})
    with pytest.raises(WorkerError, match="no compiler"):
        run_contest({}, kinds=("tunesmith", "loop"), rounds=1, steps=1, folder=tmp_path)


def test_the_last_words_are_those_that_name_the_error() -> None:
    lines = [
        "Traceback",
        "torch._inductor.exc.InductorError: InvalidCxxCompiler: none found",
        "",
        "Set TORCHDYNAMO_VERBOSE",
    ]
    assert contest.last_words(lines) == lines[1]
    assert contest.last_words(["Killed"]) == "Killed"
    assert contest.last_words([]) == "no word"


def test_on_a_gpu_the_trainers_best_runs_too() -> None:
    assert kinds_for(on_gpu=False, half=False) == ("trainer", "trainer_grouped", "loop")
    assert kinds_for(on_gpu=True, half=False) == (
        "trainer",
        "trainer_grouped",
        "trainer_bf16",
        "trainer_compiled",
        "loop",
    )
    assert "trainer_bf16" not in kinds_for(on_gpu=True, half=True)


def test_a_turn_whose_steps_tell_of_themselves_later_counts_average_steps() -> None:
    from types import SimpleNamespace

    from tunesmith.measure.ours import Counted, _turn

    lengths = np.array([10, 30])
    prepared: Any = SimpleNamespace(
        batches=SimpleNamespace(rows_per_step=4), rows=lambda split: SimpleNamespace(lengths=lengths)
    )
    assert _turn(2.0, 3, Counted(3, 12, 100), Counted(16, 64, 800), prepared) == Turn(2.0, 12, 100)
    assert _turn(2.0, 8, Counted(16, 64, 900), Counted(16, 64, 800), prepared) == Turn(2.0, 32, 400)
    assert _turn(2.0, 8, Counted(), Counted(), prepared) == Turn(2.0, 32, 640)
