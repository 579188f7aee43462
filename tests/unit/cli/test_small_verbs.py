"""init, env, completion and schema do what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
from argparse import SUPPRESS
from pathlib import Path

import pytest

from tunesmith.cli.completion import make_tree
from tunesmith.cli.main import list_verbs, main
from tunesmith.config.load import load_config
from tunesmith.config.schema import list_options
from tunesmith.runs.writing import cache_folder


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("tunesmith.data.columns")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = "".join(f"first {i},second {i},{'same' if i % 2 else 'other'}\n" for i in range(40))
    Path("pairs.csv").write_text(f"sentence1,sentence2,label\n{rows}", encoding="utf-8")
    return tmp_path


def test_init_writes_a_config_that_loads(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pairs.csv"]) == 0, capsys.readouterr().err
    assert "Train with: tunesmith train run.yaml" in capsys.readouterr().out
    config = load_config("run.yaml")
    assert config.train_file == "pairs.csv"
    assert config.text_column_names == ("sentence1", "sentence2")
    assert config.label_column_name == "label"
    assert config.do_regression is False
    text = Path("run.yaml").read_text(encoding="utf-8")
    assert all(f"{name}:" in text for name in list_options()), "an option is missing"
    assert all(option.help in text for option in list_options().values())


def test_init_with_every_comment_taken_off_is_still_a_config(pairs: Path) -> None:
    assert main(["init", "pairs.csv", "-o", "all.yaml"]) == 0
    lines = Path("all.yaml").read_text(encoding="utf-8").splitlines()
    bare = [line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in lines]
    Path("bare.yaml").write_text("\n".join(bare), encoding="utf-8")
    assert load_config("bare.yaml") == load_config("all.yaml")


def test_init_never_overwrites_without_force(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("mine", encoding="utf-8")
    assert main(["init", "pairs.csv"]) == 2
    assert "run.yaml: exists already. Use --force" in capsys.readouterr().err
    assert Path("run.yaml").read_text(encoding="utf-8") == "mine"
    assert main(["init", "pairs.csv", "--force"]) == 0
    assert load_config("run.yaml").train_file == "pairs.csv"


def test_init_of_a_missing_file_writes_nothing(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "nowhere.csv"]) in (2, 3)
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("run.yaml").exists()


def test_init_writes_yaml_only(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pairs.csv", "-o", "run.toml"]) == 2
    assert "ends in .yaml" in capsys.readouterr().err


def test_init_into_a_missing_folder_is_an_environment_problem(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pairs.csv", "-o", "no/such/run.yaml"]) == 4
    assert capsys.readouterr().err.startswith("tunesmith: error: no/such/run.yaml: cannot be written: No such file")


def test_env_as_json_and_as_text_say_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["transformers"]
    assert found["devices"][0].startswith("cpu")
    assert found["variables"]["HF_HUB_OFFLINE"] == "1"
    assert found["caches"]["cache"]["path"] == str(cache_folder()) == "/there/tunesmith"
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert found["packages"]["torch"] in text
    assert "hf_secret" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_verb_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    verbs = make_tree()._subparsers._group_actions[0].choices
    assert list(verbs) == list(list_verbs())
    for verb, parser in verbs.items():
        assert verb in script
        flags = [flag for action in parser._actions if action.help != SUPPRESS for flag in action.option_strings]
        assert len(flags) >= 3
        assert all(flag.lstrip("-") in script for flag in flags)
    program = shutil.which(shell)
    if program is not None:
        done = subprocess.run([program, "-n"], input=script, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_verbs_flags_and_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "complete.sh"
    script.write_text(
        capsys.readouterr().out
        + 'COMP_WORDS=(tunesmith sch); COMP_CWORD=1; _shtab_tunesmith; echo "${COMPREPLY[@]}"\n'
        + 'COMP_WORDS=(tunesmith env --js); COMP_CWORD=2; _shtab_tunesmith; echo "${COMPREPLY[@]}"\n'
        + 'COMP_WORDS=(tunesmith train --train_file compl); COMP_CWORD=3; _shtab_tunesmith; echo "${COMPREPLY[@]}"\n'
        + 'COMP_WORDS=(tunesmith train --eval_strategy ""); COMP_CWORD=3; _shtab_tunesmith; echo "${COMPREPLY[@]}"\n'
        + 'COMP_WORDS=(tunesmith plan --bf16 f); COMP_CWORD=3; _shtab_tunesmith; echo "${COMPREPLY[@]}"\n'
        + 'COMP_WORDS=(tunesmith train --bf16 --tes); COMP_CWORD=3; _shtab_tunesmith; echo "${COMPREPLY[@]}"\n',
        encoding="utf-8",
    )
    done = subprocess.run([bash, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == (
        "schema\n--json\ncomplete.sh\nno steps epoch\nfalse\n--test_file --test_split_name\n",
        "",
    )


def test_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err


def test_the_reference_table_holds_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert all(f"| `{name}` |" in table for name in list_options())
