"""Files and flags become one validated config; every problem is reported with its location."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunesmith.config.load import MAX_BYTES, load_config
from tunesmith.config.options import RunConfig
from tunesmith.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes, name: str = "run.yaml") -> str:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write_file


def problems_of(file: str | None, flags: dict[str, Any] | None = None, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags, **{"need_data": False, **options})
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems or (str(caught.value),)


def test_flags_override_file_and_file_overrides_defaults(write: Any) -> None:
    file = write("train_file: a.csv\nseed: 7\nlearning_rate: 1e-4\n")
    config = load_config(file, {"seed": "8"})
    assert (config.seed, config.learning_rate, config.num_train_epochs) == (8, 1e-4, None)
    assert (config.decided.learning_rate, config.decided.num_train_epochs) == (1e-4, 3.0)


def test_yaml_values_are_parsed_by_option_type(write: Any) -> None:
    config = load_config(
        write(
            "train_file: 2024-01-01\nlearning_rate: 1e-5\nlabel_column_name: no\nencoding: null\n"
            "label_names: [yes, no, on, 0123, 1e5, '~']\nmax_steps: 10\nrun_name: 0123\neval_strategy: no\n"
        )
    )
    assert config.train_file == "2024-01-01"
    assert config.learning_rate == 1e-5
    assert config.label_column_name == "no"
    assert config.encoding is None
    assert config.label_names == ("yes", "no", "on", "0123", "1e5", "~")
    assert config.run_name == "0123"
    assert config.eval_strategy == "no"


def test_all_problems_are_reported_together(write: Any) -> None:
    file = write("seed: x\nlearnin_rate: 1\n\n  \nbf16: true\nseed: 3\nlr: 1\nmetric_name: acuracy\n")
    found = problems_of(file, {"fp16": "true", "per_device_train_batch_size": "-3", "epochs": "3"})
    assert found == (
        "run.yaml:6:1: seed is set twice, first at run.yaml:1:1. Keep one of them",
        "run.yaml:2:1: learnin_rate: unknown option. Did you mean 'learning_rate'?",
        "run.yaml:7:1: lr: unknown option. Did you mean 'learning_rate'?",
        "--epochs: unknown option. Did you mean 'num_train_epochs'?",
        "--per_device_train_batch_size: -3 is too small. Use 1 or more",
        "run.yaml:8:1: metric_name: 'acuracy' is not a metric. Did you mean 'accuracy'?",
        "--fp16: cannot be used together with bf16. Set bf16 if the GPU supports it, otherwise fp16",
    )


def test_missing_training_data_is_a_problem(write: Any) -> None:
    assert len(problems_of(write("seed: x\n"), need_data=True)) == 2
    assert problems_of(write("train_fle: a.csv\n"), need_data=True) == (
        "run.yaml:1:1: train_fle: unknown option. Did you mean 'train_file'?",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: &a 1\n", "run.yaml:1:7: anchors and aliases are not accepted. Write the value out"),
        ("label_names: [a, *x]\n", "run.yaml:1:18: anchors and aliases are not accepted. Write the value out"),
        (
            "seed: 1\ntrain_file: !!python/object/apply:os.system [touch canary]\n",
            "run.yaml:2:13: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not accepted. Write the plain value",
        ),
        ("- a\n", "run.yaml:1:1: expected option names and values, such as `learning_rate: 2e-5`"),
        ("? [a]\n: 1\n", "run.yaml:1:3: a name must be plain text"),
        ("seed: " + "[" * 5000, "run.yaml:1:10: is nested too deeply"),
        ("seed: 1\n---\nseed: 2\n", "run.yaml: contains more than one YAML document. Keep one"),
        ("seed: a: b\n", "run.yaml:1:8: is not YAML: mapping values are not allowed in this context"),
        (b"seed: 1\nrun_name: \xff\n", "run.yaml:2: is not UTF-8 text. Save it as UTF-8"),
        ("x" * (MAX_BYTES + 1), "run.yaml: is larger than 1,000,000 bytes. Is it a data file?"),
    ],
)
def test_yaml_beyond_plain_config_is_refused(write: Any, text: Any, message: str) -> None:
    assert problems_of(write(text)) == (message,)
    assert not Path("canary").exists()


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "\ufeff"])
def test_empty_yaml_file_is_an_empty_config(write: Any, text: str) -> None:
    assert load_config(write(text), need_data=False) == RunConfig()


def test_config_with_thousands_of_names_is_refused(write: Any) -> None:
    text = "".join(f"key{i}: 1\n" for i in range(2000))
    assert problems_of(write(text)) == ("run.yaml: contains more than 500 names. Is it a data file?",)


def test_missing_config_file_is_one_line(write: Any) -> None:
    assert problems_of("nowhere.yaml") == (
        "nowhere.yaml: cannot read the config: No such file or directory. Check the path",
    )


@pytest.mark.parametrize(
    ("old", "value", "new", "wanted", "note"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch", "is an old name: use eval_strategy"),
        ("warmup_ratio", "0.1", "warmup_steps", 0.1, "is an old name: use warmup_steps"),
        (
            "group_by_length",
            "false",
            "train_sampling_strategy",
            "random",
            "is an old name: use train_sampling_strategy, here with the value random",
        ),
        ("tokenizer", "folder", "tokenizer_name", "folder", "is an old name: use tokenizer_name"),
        ("no_cuda", "true", "use_cpu", True, "is an old name: use use_cpu"),
        (
            "per_gpu_train_batch_size",
            "4",
            "per_device_train_batch_size",
            4,
            "is an old name: use per_device_train_batch_size",
        ),
        ("overwrite_output_dir", "true", "seed", 42, "is ignored: it has no effect, as in transformers v5"),
        ("logging_dir", "x", "seed", 42, "is ignored: curves and event log are written to the run folder"),
    ],
)
def test_old_name_is_accepted_with_a_note(
    write: Any, caplog: pytest.LogCaptureFixture, old: str, value: str, new: str, wanted: Any, note: str
) -> None:
    config = load_config(write(f"{old}: {value}\n"), need_data=False)
    assert getattr(config, new) == wanted
    assert caplog.messages == [f"run.yaml:1:1: {old} {note}"]
    caplog.clear()
    assert load_config(None, {old: value}, need_data=False) == config
    assert caplog.messages == [f"--{old} {note}"]


def test_old_and_new_name_in_one_file_are_a_problem(write: Any) -> None:
    assert problems_of(write("eval_strategy: epoch\nevaluation_strategy: no\n")) == (
        "run.yaml:2:1: eval_strategy is already set at run.yaml:1:1. Keep one of them",
    )
    config = load_config(write("evaluation_strategy: no\n"), {"eval_strategy": "epoch"}, need_data=False)
    assert config.eval_strategy == "epoch"


@pytest.mark.parametrize("name", ["trust_remote_code", "deepspeed", "push_to_hub"])
def test_unsupported_option_is_refused_unless_off(name: str) -> None:
    assert problems_of(None, {name: "true"})[0].startswith(f"--{name}: ")
    assert load_config(None, {name: "false"}, need_data=False) == RunConfig()
    assert load_config(None, {name: None}, need_data=False) == RunConfig()


def test_token_is_refused_and_not_shown() -> None:
    assert problems_of(None, {"token": "hf_secret"}) == (
        "--token: a token does not belong in a config; set the environment variable HF_TOKEN",
    )


def test_python_values_equal_text() -> None:
    native = load_config(None, {"train_file": "a", "bf16": True, "learning_rate": 1e-4, "freeze": ("embeddings",)})
    text = load_config(None, {"train_file": "a", "bf16": "true", "learning_rate": "1e-4", "freeze": "embeddings"})
    assert native == text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("label", "label_column_name"), ("text", "text_column_names"), ("class_weight", "class_weights")],
)
def test_likely_guess_suggests_the_option(name: str, wanted: str) -> None:
    assert problems_of(None, {name: "x"}) == (f"--{name}: unknown option. Did you mean {wanted!r}?",)


def test_refused_option_names_its_replacement() -> None:
    assert problems_of(None, {"dataloader_drop_last": "true"}) == (
        "--dataloader_drop_last: the last batch of an epoch is always used",
    )


def test_resume_from_checkpoint_refuses_a_folder() -> None:
    assert problems_of(None, {"resume_from_checkpoint": "runs/a/checkpoint-5"}) == (
        "--resume_from_checkpoint: doesn't accept a folder. Omit the value to resume from the latest valid checkpoint",
    )
