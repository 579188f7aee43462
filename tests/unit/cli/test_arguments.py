"""Flags are generated from the schema, and only flags on the command line override the file."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tunesmith.cli.parser import MOST_USED, Parser, add_config_arguments, config_from_args
from tunesmith.config.options import RunConfig, list_options
from tunesmith.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder_with_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("train_file: x.csv\nlearning_rate: 1e-4\nseed: 7\nbf16: true\n", encoding="utf-8")


def make_train_parser(**options: Any) -> Parser:
    parser = Parser(prog="tunesmith train")
    add_config_arguments(parser, **options)
    return parser


def read(line: str) -> RunConfig:
    return config_from_args(make_train_parser().read(shlex.split(line)))


def problem_of(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(line)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["run.yaml --seed 8", "--seed 8 run.yaml", "--config run.yaml --seed=8", "--seed 8 --config=run.yaml"],
)
def test_config_file_position_is_free_and_flags_override_it(line: str) -> None:
    assert read(line) == RunConfig(train_file="x.csv", learning_rate=1e-4, seed=8, bf16=True)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--bf16", True),
        ("--bf16 true", True),
        ("--bf16=yes", True),
        ("--bf16 false", False),
        ("--no_bf16", False),
        ("--no-bf16", False),
        ("--bf16 --seed 3", True),
        ("--no_bf16 --bf16", True),
    ],
)
def test_switch_accepts_no_value_or_true_or_false(line: str, wanted: bool) -> None:
    assert read(f"--train_file x.csv {line}").bf16 is wanted


def test_switch_before_config_file_is_parsed() -> None:
    assert read("--fp16 --no_bf16 run.yaml").fp16
    assert read("--tf32 run.yaml").train_file == "x.csv"


def test_flag_turns_off_switch_of_config_file() -> None:
    assert not read("run.yaml --no_bf16").bf16


def test_dashes_and_underscores_are_equivalent() -> None:
    assert read("--train-file x.csv --per-device_train-batch-size 4").per_device_train_batch_size == 4


@pytest.mark.parametrize(
    ("line", "name", "wanted"),
    [
        ("--text_column_names a b", "text_column_names", ("a", "b")),
        ("--text_column_names a,b", "text_column_names", ("a", "b")),
        ("--label_names 'yes, sir' no", "label_names", ("yes, sir", "no")),
        ("--class_weights 1 2.5", "class_weights", (1.0, 2.5)),
        ("--class_weights balanced", "class_weights", "balanced"),
        ("--max_steps -1", "max_steps", -1),
        ("--resume_from_checkpoint", "resume_from_checkpoint", True),
        ("--save_total_limit none", "save_total_limit", None),
        ("--delimiter '\\t'", "delimiter", "\t"),
        ("--quoting none", "quoting", "none"),
        ("--max-length 64", "max_seq_length", 64),
        ("--evaluation_strategy no", "eval_strategy", "no"),
        ("--no_cuda", "use_cpu", True),
        ("--learning_rate 1 --learning_rate 2e-5", "learning_rate", 2e-5),
    ],
)
def test_flag_sets_its_option(line: str, name: str, wanted: Any) -> None:
    assert getattr(read(f"{line} --train_file x.csv"), name) == wanted


def test_only_the_named_sections_are_added() -> None:
    parser = make_train_parser(groups=("Data",))
    assert parser.read(["--test-file", "t.csv"]).given == {"test_file": "t.csv"}
    with pytest.raises(ConfigError, match="unknown flag --seed"):
        parser.read(["--seed", "3"])


def test_parsers_share_no_state() -> None:
    parser = make_train_parser()
    assert parser.read(["--seed", "3"]).given == {"seed": "3"}
    assert parser.read([]).given == {}


def test_unknown_flags_are_all_reported_with_nearest_name() -> None:
    assert problem_of("--learnin_rate 3 --lr 3 --label x --label_col x --zzzz=3").splitlines() == [
        "5 problems in the configuration:",
        "  unknown flag --learnin_rate. Did you mean --learning_rate?",
        "  unknown flag --lr. Did you mean --learning_rate?",
        "  unknown flag --label. Did you mean --label_column_name?",
        "  unknown flag --label_col. Did you mean --label_column_name?",
        "  unknown flag --zzzz. See `tunesmith train --help`",
    ]


def test_unknown_flags_do_not_hide_other_errors() -> None:
    assert problem_of("--trian_file x.csv --learning_rate abc --metric_for_best_model accuracyy").splitlines() == [
        "3 problems in the configuration:",
        "  unknown flag --trian_file. Did you mean --train_file?",
        "  --learning_rate: expected a number, got 'abc'",
        "  --metric_for_best_model: 'accuracyy' is not a metric. Did you mean 'accuracy'?",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--train_file", "argument --train_file: expected one argument. See `tunesmith train --help`"),
        ("run.yaml more.yaml", "unexpected argument 'more.yaml'. See `tunesmith train --help`"),
        ("run.yaml --config run.yaml", "two config files: run.yaml and run.yaml. Pass one"),
        ("", "train_file: no training data. Use --train_file FILE, --task_name mrpc or --dataset_name NAME"),
        ("run.yaml --seed x", "--seed: expected a whole number, got 'x'"),
        ("run.yaml --bf16=maybe", "--bf16: expected true or false, got 'maybe'"),
    ],
)
def test_invalid_command_is_reported_in_one_line(line: str, message: str) -> None:
    assert problem_of(line) == message


def test_help_shows_only_the_most_used_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = make_train_parser().format_help()
    assert text.startswith("usage: tunesmith train [run.yaml] [options]\n")
    shown = set(re.findall(r"^  --(\w+)", text, re.MULTILINE))
    assert shown == {*MOST_USED, "help_all"}


def test_help_all_shows_every_option_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        make_train_parser().read(["--help_all"])
    text = capsys.readouterr().out
    assert all(len(re.findall(rf"^  --{name}\b", text, re.MULTILINE)) == 1 for name in list_options())
    assert "larger gradients are clipped. 0: no clipping." in " ".join(text.split())
    assert "Default: 1.0." in text
    assert "--padding_free auto|on|off" in text
    for group in {option.group for option in list_options().values() if option.name not in MOST_USED}:
        assert f"\n{group}:\n" in text
    assert "evaluation_strategy" not in text
    assert "--no_bf16 " not in text.split("Set switches as")[0]
