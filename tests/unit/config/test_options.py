"""One schema: help by AST, names of runs, YAML that reads back equal, a JSON schema."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.config.load import load_config, read_entries, read_top_level
from tunesmith.config.options import RunConfig, dump_config, dump_value, list_options, to_dict
from tunesmith.errors import ConfigError


def test_the_string_under_a_field_is_its_help() -> None:
    assert list_options()["learning_rate"].help.startswith("Peak learning rate, after warmup.")


def test_every_field_belongs_to_one_section() -> None:
    assert set(list_options()) == {field.name for field in dataclasses.fields(RunConfig)}
    assert len({option.group for option in list_options().values()}) == 9


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({"train_file": "data/pairs.csv.gz"}, "runs/pairs-all-MiniLM-L6-v2"),
        ({"train_file": "data/pairs.v2.xlsx"}, "runs/pairs.v2-all-MiniLM-L6-v2"),
        ({"train_file": "data/pairs.v2"}, "runs/pairs.v2-all-MiniLM-L6-v2"),
        ({"task_name": "mrpc", "model_name_or_path": "google/electra-small"}, "runs/mrpc-electra-small"),
        ({"dataset_name": "org/reviews", "model_name_or_path": "models/bert/"}, "runs/reviews-bert"),
        ({"train_file": "a.csv", "run_name": "mine"}, "runs/mine"),
        ({"train_file": "a.csv", "run_name": "mine", "output_dir": "out/x"}, "out/x"),
        ({}, "runs/run-all-MiniLM-L6-v2"),
    ],
)
def test_a_run_has_a_folder_even_when_nobody_names_one(options: dict[str, Any], folder: str) -> None:
    assert RunConfig(**options).run_folder == Path(folder)


def test_inside_a_tab_is_a_tab_and_a_metric_has_one_name() -> None:
    config = RunConfig(delimiter="\\t", metric_for_best_model="eval_mcc", metric_name=("acc",))
    assert config.delimiter == "\t"
    assert config.metric_for_best_model == "matthews_correlation"
    assert config.metric_name == ("accuracy",)


def test_a_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = RunConfig(
        train_file="a.csv",
        delimiter="\t",
        text_column_names=("no", "a, b"),
        label_column_name="null",
        label_names=("0123", "1e5", "~", "yes", 'say "x" \\ # : \u2028 \U0001f600'),
        learning_rate=1e-5,
        class_weights=(1.0, 0.3),
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"power": 2, "lr_end": 1e-7},
        resume_from_checkpoint=True,
        freeze=("embeddings",),
        save_total_limit=None,
        label_smoothing_factor=0.1 + 0.2,
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config, header="one\ntwo"), encoding="utf-8")
    config_again = load_config(file, {"class_weights": "balanced", "label_smoothing_factor": "0.30000000000000004"})
    assert dataclasses.replace(config_again, class_weights=(1.0, 0.3)) == config
    assert file.read_text(encoding="utf-8").startswith("# one\n# two\n\n# --- Data ---\n")


def test_only_some_options_can_be_written() -> None:
    assert dump_config(RunConfig(seed=3), only=("seed",)) == (
        f"# --- Training ---\n# {list_options()['seed'].help}\nseed: 3\n"
    )


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_survives_yaml(text: str) -> None:
    (entry,) = read_top_level(f"run_name: {dump_value(text)}\n", "x").entries
    assert entry.value == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_survives_yaml(number: float) -> None:
    (entry,) = read_top_level(f"x: {dump_value(number)}\n", "x").entries
    assert float(entry.value) == number


@given(st.binary(max_size=200), st.sampled_from([".yaml", ".yml"]))
def test_any_bytes_end_in_entries_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    file = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    file.write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert read_entries(file) is not None


def test_a_config_becomes_plain_values_in_reading_order() -> None:
    values = to_dict(RunConfig(text_column_names=("a", "b")))
    assert list(values) == list(list_options())
    assert values["text_column_names"] == ["a", "b"]
