"""User files stay unchanged, whatever folder a command uses."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from read_predictions import read_predictions
from sampling import crossed
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.config.load import load_config
from tunesmith.pipeline.inputs import free_folder
from tunesmith.runs.folder import RunDir

Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a data file, a model, a finished run, and a run that was stopped after its third step."""
    root = tmp_path_factory.mktemp("folders")
    save_tiny_bert(root / "base")
    write_csv(root / "rows.csv", [{"text": t, "label": "good" if good else "bad"} for t, good in sentences(40)])
    assert main(words(root, root / "ended")) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNESMITH_FAULT", "step.end:term:2")
        assert main(words(root, root / "stopped")) == 143
    return root


def words(root: Path, run: Path | str, *more: str) -> list[str]:
    return [
        *("train", "--train_file", str(root / "rows.csv"), "--model_name_or_path", str(root / "base")),
        *("--output_dir", str(run), "--cache_dir", str(root / "cache"), "--use_cpu", "--max_steps", "4"),
        *("--save_strategy", "steps", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"),
        *("--train_sample_size", "8", "--load_best_model_at_end", "true"),
        *more,
    ]


@pytest.fixture
def command(lab: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(folder: Path | str, *more: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(words(lab, folder, *more))
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def stopped(lab: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lab / "stopped", tmp_path / "run"))


@pytest.fixture
def ended(lab: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lab / "ended", tmp_path / "run"))


def tree(folder: Path) -> dict[str, Any]:
    """Return every path below a folder, with its bytes or link target."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "name",
    ["README.md", "metrics.json", "run.yaml", "journal.jsonl", "model/weights.bin", "best/x", "notes.txt", ".hidden"],
)
def test_folder_without_run_is_refused_and_unchanged(name: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "mine" / name).parent.mkdir(parents=True)
    (tmp_path / "mine" / name).write_text("mine")
    before = tree(tmp_path)
    code, told = command(tmp_path / "mine")
    assert (code, tree(tmp_path)) == (4, before)
    assert (
        f"contains {name.split('/')[0]} and is not a tunesmith run. Set --output_dir to a new or empty folder" in told
    )


def test_empty_folder_or_leftover_of_killed_start_is_used(tmp_path: Path, lab: Path, command: Command) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text('{"pid": 1, "host": "x"}')
    (tmp_path / "run" / ".tmp-run.yaml-77").write_text("cut")
    assert command(tmp_path / "run", "--max_steps", "1")[0] == 0
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / ".tmp-run.yaml-77").exists()


@pytest.mark.parametrize("name", ["model/a.txt", "checkpoint-4/a.txt"])
def test_run_refuses_folder_with_conflicting_user_file(name: str, stopped: Path, command: Command) -> None:
    (stopped / name).parent.mkdir(exist_ok=True)
    (stopped / name).write_text("mine")
    before = tree(stopped)
    code, told = command(stopped)
    assert (code, tree(stopped)) == (4, before)
    assert f"contains {name.split('/')[0]}, which tunesmith did not write" in told


def test_resume_and_rotation_keep_unrelated_files(stopped: Path, command: Command) -> None:
    mine = ["notes.txt", "checkpoint-3/notes.txt", "best/notes.txt", "data/rows.csv", "checkpoint-old/x", "link"]
    for name in mine[:-1]:
        (stopped / name).parent.mkdir(exist_ok=True)
        (stopped / name).write_text(name)
    (stopped / "link").symlink_to("notes.txt")
    code, told = command(stopped)
    assert code == 0, told
    assert {name: (stopped / name).read_text() for name in mine[:-1]} == {name: name for name in mine[:-1]}
    assert os.readlink(stopped / "link") == "notes.txt"
    assert "checkpoint-3 is kept: notes.txt was not written by tunesmith" in told


@pytest.mark.parametrize(
    ("name", "kind"),
    crossed(["journal.jsonl", ".lock", "run.yaml", "report.html", "curves.png"], ["link", "pipe", "socket", "folder"]),
)
def test_special_files_in_run_folder_are_refused(
    name: str, kind: str, stopped: Path, tmp_path: Path, command: Command
) -> None:
    make_special(stopped / name, kind, tmp_path / "mine.txt")
    code, told = command(stopped)
    assert (code, (tmp_path / "mine.txt").read_text()) == (4, "mine"), told
    assert name in told


def make_special(path: Path, kind: str, mine: Path) -> None:
    mine.write_text("mine")
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)  # socket paths must be short
            server.bind(path.name)


@pytest.fixture(autouse=True)
def back() -> Iterator[None]:
    here = Path.cwd()
    yield
    os.chdir(here)


@pytest.mark.parametrize("verb", ["report", "doctor", "resume"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_event_log_that_is_no_file_is_an_error(
    verb: str, kind: str, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_special(ended / "journal.jsonl", kind, tmp_path / "mine.txt")
    assert main([verb, str(ended)]) in (2, 4, 5)
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"), crossed(["curves.png", "curves.svg", "report.html"], ["link", "pipe", "folder"])
)
def test_plots_and_reports_replace_only_regular_files(
    name: str, kind: str, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_special(ended / name, kind, tmp_path / "mine.txt")
    before = tree(tmp_path / "run") if kind != "pipe" else {}
    assert main(["report", str(ended)]) == 4
    assert name in capsys.readouterr().err
    assert before in ({}, tree(tmp_path / "run"))
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_planted_temporary_links_are_not_followed(ended: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for name in (".report.html.tmp", f".tmp-report.html-{os.getpid()}", f".tmp-curves.png-{os.getpid()}"):
        (ended / name).symlink_to(tmp_path / "mine.txt")
    assert main(["report", str(ended)]) == 0
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_output_replaces_only_regular_files(lab: Path, ended: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    for verb in (["report", str(ended)], ["compare", str(ended), str(lab / "ended")]):
        for target in ("link.html", "out"):
            assert main([*verb, "-o", str(tmp_path / target)]) == 4
        assert (tmp_path / "old.html").read_text() == "old"
        assert main([*verb, "-o", str(tmp_path / "new.html")]) == 0
        assert main([*verb, "-o", str(tmp_path / "new.html")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "new.html", "old.html", "out", "run"]


def test_hard_link_to_event_log_is_unchanged(stopped: Path, tmp_path: Path, command: Command) -> None:
    """`cp -al` copies a run folder with hard links to its files."""
    for name in ("journal.jsonl", ".lock"):
        os.link(stopped / name, tmp_path / f"copy{name}")
    before = {p.name: p.read_bytes() for p in tmp_path.glob("copy*")}
    assert command(stopped)[0] == 0
    assert {p.name: p.read_bytes() for p in tmp_path.glob("copy*")} == before


@pytest.mark.parametrize("where", ["base", ".", "base/run"])
def test_output_folder_cannot_be_the_model_folder(where: str, lab: Path, command: Command) -> None:
    before = tree(lab / "base")
    code, told = command(lab / where)
    assert (code, tree(lab / "base")) == (4, before)
    assert "the path of --model_name_or_path" in told


def test_model_of_a_run_cannot_be_trained_into_same_run(stopped: Path, lab: Path, command: Command) -> None:
    before = tree(stopped)
    assert command(stopped, "--model_name_or_path", str(stopped / "checkpoint-3"))[0] == 4
    assert tree(stopped) == before


@pytest.mark.parametrize("gone", ["report.html", "environment.json", "journal.jsonl", "README.md", None])
def test_finished_run_without_checkpoints_is_not_overwritten(gone: str | None, ended: Path, command: Command) -> None:
    for folder in RunDir(ended).checkpoints():
        shutil.rmtree(folder)
    if gone is not None:
        (ended / gone).unlink()
    before = tree(ended)
    code, told = command(ended, "--learning_rate", "3e-3")
    assert (code, tree(ended)) == (5, before), told
    assert ("without their event log" if gone == "journal.jsonl" else "of a different config") in told


def test_resume_without_checkpoint_is_an_error(tmp_path: Path, command: Command) -> None:
    code, told = command(tmp_path / "run", "--resume_from_checkpoint", "true")
    assert code == 5
    assert "contains no checkpoint to resume from" in told
    assert not (tmp_path / "run").exists()


def test_tilde_is_expanded_in_flags_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text('output_dir: "~/runs/a"\ntrain_file: ~/rows.csv\ncache_dir: ~/cache\n')
    config = load_config(tmp_path / "c.yaml", {"model_name_or_path": "~/base"})
    assert str(config.run_folder) == f"{tmp_path}/runs/a"
    assert (config.train_file, config.cache_dir) == (f"{tmp_path}/rows.csv", f"{tmp_path}/cache")
    assert config.model_name_or_path == f"{tmp_path}/base"


@pytest.mark.parametrize("option", ["output_dir", "cache_dir", "train_file"])
def test_unknown_home_folder_is_an_error(option: str, command: Command, tmp_path: Path) -> None:
    code, told = command(tmp_path / "run", f"--{option}", "~no-such-person/x")
    assert code == 2
    assert "~no-such-person is not a home folder" in told


@pytest.mark.parametrize("name", ["../../x", "/abs", "..", ".", "a/b", "a\\b", " ", "a\nb", "a\x7fb"])
def test_run_name_cannot_leave_output_folder(name: str, lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--train_file", str(lab / "rows.csv"), f"--run_name={name}"]) == 2
    assert "cannot be the name of a folder in runs/" in capsys.readouterr().err


@pytest.mark.parametrize("name", [os.fsdecode(b"run-\xff"), "a\0b", "x" * 300])
def test_unusable_folder_name_is_reported(name: str, tmp_path: Path, command: Command) -> None:
    code, told = command(f"{tmp_path}/{name}")
    assert code == (4 if len(name) == 300 else 2)
    assert "unexpected" not in told


def test_free_folder_skips_folders_in_use(ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/mine.txt").write_text("mine")
    assert free_folder(Path("runs/demo")) == Path("runs/demo-2")
    assert free_folder(ended) == ended.with_name("run-2")
    assert free_folder(tmp_path / "runs" / "new") == tmp_path / "runs" / "new"


@pytest.mark.parametrize("name", ["journal.jsonl", "predictions.parquet"])
def test_predictions_cannot_replace_files_of_a_run(name: str, ended: Path, lab: Path) -> None:
    before = (ended / name).read_bytes()
    assert main(["predict", str(ended), "--input", str(lab / "rows.csv"), "--output", str(ended / name)]) == 4
    assert (ended / name).read_bytes() == before


@pytest.mark.parametrize("verb", ["report", "predict"])
def test_output_below_a_file_is_reported(
    verb: str, ended: Path, lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    more = ["--input", str(lab / "rows.csv")] if verb == "predict" else []
    assert main([verb, str(ended), *more, "--output", str(tmp_path / "mine.txt" / "x.csv")]) == 4
    assert "unexpected" not in capsys.readouterr().err


def test_predictions_of_hostile_cells_survive_a_round_trip(ended: Path, tmp_path: Path) -> None:
    cells = ["a\rb", "\n=1", "＝1", ' "q" ', "x\r\ny", "a\u2028b"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": cell}) + "\n" for cell in cells))
    words = ["predict", str(ended), "--input", str(tmp_path / "in.jsonl"), "--use_cpu", "--output"]
    for name in ("out.csv", "out.tsv"):
        assert main([*words, str(tmp_path / name)]) == 0
        assert read_predictions(tmp_path / name)["text"] == cells


def test_cache_inside_run_folder_is_allowed(lab: Path, tmp_path: Path, command: Command) -> None:
    cache = ["--cache_dir", str(tmp_path / "run" / "cache"), "--max_steps", "1"]
    (tmp_path / "bad.csv").write_text("text,label\na,b\n")
    assert command(tmp_path / "run", *cache, "--train_file", str(tmp_path / "bad.csv"))[0] == 3
    assert command(tmp_path / "run", *cache)[0] == 0
