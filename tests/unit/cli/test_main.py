"""The command line: commands, exit codes, and errors in one line."""

from __future__ import annotations

import errno
import logging
import types
from typing import Any

import pytest

from tunesmith import errors
from tunesmith.cli import main as front
from tunesmith.cli.main import explain, list_verbs, main


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the command `train`."""

    def put(action: Any) -> None:
        module = types.ModuleType("tunesmith.cli.train", "Stand-in for a verb.")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int, help="A number.")  # type: ignore[attr-defined]
        module.run = action  # type: ignore[attr-defined]
        monkeypatch.setattr(front, "list_verbs", lambda: {"train": "train something", "search": "search"})
        monkeypatch.setattr(front, "load_verb", lambda name: module)

    return put


def raising(error: BaseException) -> Any:
    def run(args: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.DataError("x"), 3),
        (errors.ResourceError("x"), 4),
        (errors.CheckpointError("x"), 5),
        (errors.NumericsError("x"), 6),
        (errors.WorkerError("x"), 7),
        (errors.StoppedBySignal(2, "x"), 130),
        (errors.StoppedBySignal(15, "x"), 143),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 4),
        (OSError(errno.ENOSPC, "No space left on device", "run/x"), 4),
        (PermissionError(errno.EACCES, "Permission denied", "run"), 4),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), 4),
        (RuntimeError("boom"), 1),
        (type("PanicException", (BaseException,), {})("rust"), 3),
    ],
)
def test_error_prints_one_line_and_returns_exit_code(
    verb: Any, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    verb(raising(error))
    assert main(["train"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tunesmith: ")
    assert shown.err.count("\n") == 1


def test_unexpected_error_explains_how_to_see_traceback(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(RuntimeError("two\nlines")))
    assert main(["train"]) == 1
    assert capsys.readouterr().err == (
        "tunesmith: error: unexpected RuntimeError: two lines. Run again with --debug for the traceback\n"
    )


@pytest.mark.parametrize("words", [["train", "--debug"], ["--debug", "train"]])
def test_debug_prints_traceback_and_keeps_exit_code(
    verb: Any, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    verb(raising(errors.DataError("bad row")))
    assert main(words) == 3
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("tunesmith: error: bad row\n")


def test_command_gets_arguments_and_returns_exit_code(verb: Any) -> None:
    seen: list[Any] = []
    verb(lambda args: seen.append((args.number, args.debug)) or 5)
    assert main(["train", "--number", "3"]) == 5
    assert seen == [(3, False)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean `tunesmith train`?"),
        (["xyzzy"], "unknown command 'xyzzy'. Commands: train, search"),
        (
            ["--seed", "3"],
            "unknown flag '--seed'. The command comes first, such as `tunesmith train --train_file pairs.csv`",
        ),
    ],
)
def test_unknown_command_suggests_nearest_name(
    verb: Any, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    verb(lambda args: 0)
    assert main(words) == 2
    assert capsys.readouterr().err == f"tunesmith: error: {message}\n"


def test_missing_command_prints_overview_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    bare = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == bare
    assert all(f"\n  {name:<12}" in bare for name in list_verbs())


def test_notes_go_to_stderr_and_logging_is_restored(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("tunesmith")
    before = (list(logger.handlers), logger.level, logger.propagate)
    verb(lambda args: logging.getLogger("tunesmith.config.load").warning("an old name") or 0)
    assert main(["train"]) == 0
    assert capsys.readouterr().err == "tunesmith: note: an old name\n"
    assert (list(logger.handlers), logger.level, logger.propagate) == before


def test_error_without_message_prints_a_line() -> None:
    assert explain(RuntimeError())[1].startswith("error: unexpected RuntimeError: no message")
