"""The surface a user of Hugging Face knows: names, defaults, verbs, exit codes, and a front that starts at once."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from tunesmith.cli.main import VERBS, list_verbs, load_verb, main, make_parser
from tunesmith.cli.parser import Parser
from tunesmith.config.load import IGNORED, REFUSED, RENAMED
from tunesmith.config.options import Recipe, RunConfig, list_options

DESIGN_NAMES = [
    "output_dir",
    "per_device_train_batch_size",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "fp16",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "resume_from_checkpoint",
    "seed",
    "data_seed",
    "full_determinism",
    "report_to",
    "run_name",
    "dataloader_num_workers",
    "train_sampling_strategy",
    "model_name_or_path",
    "task_name",
    "dataset_name",
    "dataset_config_name",
    "train_file",
    "validation_file",
    "test_file",
    "text_column_names",
    "label_column_name",
    "max_seq_length",
    "pad_to_max_length",
    "max_train_samples",
    "preprocessing_num_workers",
    "metric_name",
]

OLD_NAMES = [
    "evaluation_strategy",
    "warmup_ratio",
    "group_by_length",
    "tokenizer",
    "no_cuda",
    "overwrite_output_dir",
    "logging_dir",
    "max_length",
    "per_gpu_train_batch_size",
    "per_gpu_eval_batch_size",
]

V5_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.0,
    "fp16": False,
    "seed": 42,
    "data_seed": None,
    "save_steps": 500,
    "dataloader_num_workers": 0,
    "dataloader_drop_last": False,
    "eval_delay": 0,
}

HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow", "sklearn", "scipy", "matplotlib")


def test_every_name_of_the_design_is_an_option() -> None:
    assert [name for name in DESIGN_NAMES if name not in list_options()] == []


def test_every_old_name_is_accepted_in_some_way() -> None:
    assert [name for name in OLD_NAMES if name not in {*RENAMED, *IGNORED}] == []
    assert set(RENAMED.values()) <= list_options().keys()
    assert not list_options().keys() & {*RENAMED, *IGNORED, *REFUSED}


def test_the_defaults_are_those_of_transformers_but_for_what_the_recipe_decides() -> None:
    config = RunConfig()
    open_options = {field.name for field in fields(Recipe)}
    assert all(getattr(config, name) is None for name in open_options)
    found = {name: getattr(config.decided if name in open_options else config, name) for name in V5_DEFAULTS}
    assert found == V5_DEFAULTS, "--recipe hf is what transformers does"


def test_the_listed_defaults_are_those_of_the_dataclass() -> None:
    config = RunConfig()
    assert {name: option.default for name, option in list_options().items()} == {
        name: getattr(config, name) for name in RunConfig.__dataclass_fields__
    }


def test_every_option_has_one_sentence_of_help() -> None:
    texts = {name: option.help for name, option in list_options().items()}
    assert [name for name, text in texts.items() if not re.fullmatch(r"[A-Z][^\n]{8,}\.", text)] == []


def test_every_verb_file_is_in_the_table() -> None:
    listed = {verb for verbs in VERBS.values() for verb in verbs}
    rooms = {"__init__", "main", "parser", "arguments"}
    folder = Path(importlib.import_module("tunesmith.cli").__file__ or "").parent
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.stem not in rooms and "def add_arguments(" in text and "def run(" in text:
            assert path.stem in listed


@pytest.mark.parametrize("verb", list_verbs())
def test_a_verb_has_the_two_functions_and_readable_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = load_verb(verb)
    parser = make_parser(verb, module)
    assert isinstance(parser, Parser)
    assert callable(module.run)
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: tunesmith {verb}")
    assert all(action.help for action in parser._actions), "an argument has no help"


def run_tunesmith(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tunesmith", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False, **options)


def test_python_dash_m_answers_with_help_version_and_exit_codes() -> None:
    done = run_tunesmith("--help")
    assert done.returncode == 0
    assert "tunesmith train --train_file" in done.stdout
    done = run_tunesmith("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "tunesmith")
    done = run_tunesmith("serch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tunesmith: error: unknown command 'serch'. Did you mean `tunesmith search`?\n"


def test_help_and_config_errors_import_nothing_heavy(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learnin_rate: 1\n", encoding="utf-8")
    code = f"""
import contextlib, io, sys
from tunesmith.cli.main import main
from tunesmith.cli.parser import Parser
from tunesmith.cli.parser import add_config_arguments, config_from_args
from tunesmith.errors import ConfigError
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["--help"]) == 0
    parser = Parser(prog="tunesmith train")
    add_config_arguments(parser)
    parser.print_help()
try:
    config_from_args(parser.read([{str(config)!r}]))
except ConfigError:
    pass
else:
    sys.exit("no error")
sys.exit(" ".join(name for name in {HEAVY!r} if name in sys.modules) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif("train" not in list_verbs(), reason="the train verb is not in this build")
def test_train_help_imports_nothing_heavy() -> None:
    code = f"""
import contextlib, io, sys
from tunesmith.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["train", "--help"]) == 0
sys.exit(" ".join(name for name in {HEAVY!r} if name in sys.modules) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
