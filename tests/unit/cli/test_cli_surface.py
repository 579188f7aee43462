"""Names and defaults known from Hugging Face, commands, exit codes, and a command line that starts fast."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from tunesmith.cli.main import list_verbs, load_verb, main, make_parser
from tunesmith.cli.parser import Parser
from tunesmith.config.options import Recipe, RunConfig, list_options

SHARED_OPTIONS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("gradient_accumulation_steps", "max_grad_norm", "label_smoothing_factor", "fp16", "seed", "data_seed"),
    "save_steps",
)

HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow", "sklearn", "scipy", "matplotlib")


def test_defaults_match_transformers_except_recipe_options() -> None:
    from transformers import TrainingArguments

    config = RunConfig()
    open_options = {field.name for field in fields(Recipe)}
    assert all(getattr(config, name) is None for name in open_options)
    found = {name: getattr(config.decided if name in open_options else config, name) for name in SHARED_OPTIONS}
    theirs = {field.name: field.default for field in fields(TrainingArguments)}
    assert found == {name: theirs[name] for name in SHARED_OPTIONS}, "--recipe hf is what transformers does"


def test_every_option_has_one_help_sentence() -> None:
    texts = {name: option.help for name, option in list_options().items()}
    assert [name for name, text in texts.items() if not re.fullmatch(r"[A-Z][^\n]{8,}\.", text)] == []


@pytest.mark.parametrize("verb", list_verbs())
def test_each_command_has_two_functions_and_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_python_dash_m_prints_help_version_and_exit_codes() -> None:
    done = run_tunesmith("--help")
    assert done.returncode == 0
    assert "tunesmith train --train_file" in done.stdout
    done = run_tunesmith("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "tunesmith")
    done = run_tunesmith("serch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tunesmith: error: unknown command 'serch'. Did you mean `tunesmith search`?\n"


def test_help_and_config_errors_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learnin_rate: 1\n", encoding="utf-8")
    code = f"""
import sys
from tunesmith.cli.main import main
assert main(["--help"]) == main(["train", "--help"]) == 0
assert main(["train", {str(tmp_path / "run.yaml")!r}]) == 2
sys.exit(" ".join(name for name in {HEAVY!r} if name in sys.modules) or 0)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 0, done.stderr


def test_notebook_without_ipywidgets_shows_no_warning() -> None:
    code = """
import sys, types
kernel = types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules |= {"IPython": types.SimpleNamespace(get_ipython=lambda: kernel), "ipywidgets": None}
import tunesmith
tunesmith.RunConfig
import tqdm.auto
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
