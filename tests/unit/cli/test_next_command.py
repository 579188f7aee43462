"""`tunesmith diagnose` prints the first advice as a command that can be run, and names what it cannot tell apart."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tunesmith.cli.diagnose import next_command
from tunesmith.config.load import load_config
from tunesmith.findings import Finding


@pytest.mark.parametrize(
    ("advice", "flags"),
    [
        ("--learning_rate 3e-5", ["--learning_rate", "3e-5"]),
        ("leave out --freeze: the whole encoder learns then", ["--freeze", ""]),
        (
            "--validation_file '' --validation_split_fraction 0.1: rows of one source",
            ["--validation_file", "", "--validation_split_fraction", "0.1"],
        ),
    ],
)
def test_an_advice_made_of_options_is_a_training_command(tmp_path: Path, advice: str, flags: list[str]) -> None:
    (tmp_path / "run.yaml").write_text("train_file: a.csv\nvalidation_file: b.csv\nfreeze: [encoder]\n")
    words = shlex.split(next_command(tmp_path, Finding("underfitting", "warning", "", (advice,))) or "")
    assert words[:3] == ["tunesmith", "train", str(tmp_path / "run.yaml")]
    assert words[-len(flags) :] == flags
    given = {name.removeprefix("--"): value for name, value in zip(words[5::2], words[6::2], strict=True)}
    config = load_config(tmp_path / "run.yaml", given)
    if "freeze" in given:
        assert config.freeze == ()
    if "validation_file" in given:
        assert config.validation_file is None


def test_an_advice_that_is_a_command_is_printed_as_it_is(tmp_path: Path) -> None:
    audit = Finding("no_signal", "error", "", ("tunesmith audit 'my rows.csv': lists labels", "--num_train_epochs 6"))
    assert next_command(tmp_path, audit) == "tunesmith audit 'my rows.csv'"
    resume = Finding("stopped_too_early", "warning", "", ("tunesmith resume: the run ended at step 3 of 9",))
    assert next_command(tmp_path, resume) == f"tunesmith resume {tmp_path}"


def test_verdicts_that_cannot_be_told_apart_are_named_with_their_probabilities() -> None:
    unsure = Finding("underfitting", "warning", "", (), 0.6, {"close": {"label_noise": 0.35}})
    assert unsure.doubt == ", or label noise: 60 / 35"
    assert Finding("underfitting", "warning", "", (), 0.97).doubt == ""
