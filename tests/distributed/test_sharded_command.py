"""`tunesmith train --fsdp` and `accelerate launch --use_fsdp` on two ranks: the run of one rank, and its resume."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.launching import accelerate_launch, alive, finish, free_port, start, torchrun
from distributed.test_command_ranks import alone, compare, numbers, place, stopped_run, words
from patience import patient
from tunesmith.events import Note, Resumed, StepDone
from tunesmith.runs.journal import read_journal
from tunesmith.runs.layout import RunDir
from warm import warm_python

__all__ = ["place"]  # a fixture
pytestmark = pytest.mark.slow
KEPT = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "100")


@pytest.fixture(scope="module")
def one(place: Path) -> dict[str, Any]:
    """The run on one rank with the whole batch, and a new head: that of a sharded model is not fitted."""
    ended = alone(*words(place, place / "one-new-head", "--head_start", "off", batch=8))
    assert ended.code == 0, ended.err
    return numbers(place / "one-new-head")


@pytest.fixture(scope="module")
def launched(place: Path) -> Path:
    """A run that accelerate launched with FSDP, its checkpoints kept."""
    run = place / "launched-sharded"
    command = accelerate_launch("-m", "tunesmith", *words(place, run, *KEPT))
    command[command.index("--multi_gpu")] = "--use_fsdp"
    ended = finish(start(command))
    assert ended.code == 0, ended.err[-3000:]
    assert "FSDP: weights, gradients and optimizer state are sharded over 2 ranks." in ended.err
    assert "Recipe: head_start off: the model is sharded." in ended.err
    for name in ("Padding_free", "Cls_only_last_layer", "Restrict_vocabulary"):
        assert f"{name} is off: the weights are sharded (fsdp)." in ended.err
    return run


def test_accelerate_launch_with_fsdp_gives_the_run_of_one_rank(launched: Path, one: dict[str, Any]) -> None:
    found = numbers(launched)
    compare({**found, "saved": one["saved"]}, one)


CONFIG_FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: {reshard}
  fsdp_state_dict_type: {kind}
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_version: {version}
machine_rank: 0
main_process_ip: 127.0.0.1
main_process_port: {port}
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


def by_config_file(place: Path, run: Path, *, reshard: str, version: int, kind: str = "FULL_STATE_DICT") -> Any:
    """How `accelerate launch --config_file` ended, with a file as `accelerate config` writes it."""
    file = place / f"fsdp-{version}-{kind}.yaml"
    file.write_text(CONFIG_FILE.format(reshard=reshard, version=version, kind=kind, port=free_port()))
    launch = [warm_python(), "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return finish(start([*launch, "-m", "tunesmith", *words(place, run)]))


@pytest.mark.parametrize(("version", "reshard"), [(2, "true"), (1, "SHARD_GRAD_OP")])
def test_fsdp_in_the_config_file_of_accelerate_gives_the_run_of_one_rank(
    place: Path, one: dict[str, Any], tmp_path: Path, version: int, reshard: str
) -> None:
    ended = by_config_file(place, tmp_path / "run", reshard=reshard, version=version)
    assert ended.code == 0, ended.err[-3000:]
    assert "FSDP: weights, gradients and optimizer state are sharded over 2 ranks." in ended.err
    compare(numbers(tmp_path / "run"), one)


def test_a_sharded_checkpoint_asked_for_by_the_config_file_is_refused_by_name(place: Path, tmp_path: Path) -> None:
    ended = by_config_file(place, tmp_path / "run", reshard="true", version=2, kind="SHARDED_STATE_DICT")
    assert ended.code != 0
    assert "state_dict_type 'SHARDED_STATE_DICT' is not supported. Use FULL_STATE_DICT" in ended.err
    assert not (tmp_path / "run" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    "victim", [pytest.param(0, marks=pytest.mark.long), 1]
)  # both without FSDP: test_command_ranks.py
def test_a_rank_that_dies_ends_the_job_with_exit_7_and_the_same_command_goes_on(
    place: Path, tmp_path: Path, victim: int
) -> None:
    run, short = tmp_path / "run", ("--num_train_epochs", "5")
    ended, ranks, seconds = stopped_run(place, run, victim, signal.SIGKILL, "--fsdp", "full_shard", *short)
    assert seconds < patient(15)
    assert ended.code != 0
    named = rf"tunesmith: error: rank {victim} \(process {ranks[victim]} on .*\) (has died|is gone)"
    assert re.search(named, ended.err), ended.err[-3000:]
    assert (tmp_path / f"run-exit-{1 - victim}").read_text() == "7"
    assert alive(ranks) == []
    saved = RunDir(run).checkpoints()[-1]
    command = words(place, run, "--save_strategy", "steps", "--save_steps", "2", "--fsdp", "full_shard", *short)
    again = finish(start(torchrun("-m", "tunesmith", *command)))
    assert again.code == 0, again.err[-3000:]
    events = read_journal(RunDir(run).journal_file)
    assert [f"checkpoint-{e.step}" for e in events if isinstance(e, Resumed)] == [saved.name]
    assert [e.step for e in events if isinstance(e, StepDone)] == list(range(1, 31))


def test_fp16_on_a_cpu_is_refused_with_what_to_use(place: Path, tmp_path: Path) -> None:
    ended = finish(
        start(torchrun("-m", "tunesmith", *words(place, tmp_path / "run", "--fsdp", "full_shard", "--fp16")))
    )
    assert ended.code != 0
    assert "fp16 needs a GPU, and this run is on a CPU. Leave --fp16 out, or use --bf16" in ended.err


def test_the_model_folder_loads_without_fsdp(launched: Path, one: dict[str, Any]) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(launched / "model")
    assert model.config.architectures == ["BertForSequenceClassification"]
    assert sum(p.numel() for p in model.parameters()) == 30562, "three layers: the last one averages"


def test_a_resume_by_flag_is_bit_identical_and_one_rank_says_what_differs(
    place: Path,
    launched: Path,
    tmp_path: Path,
) -> None:
    whole = numbers(launched)
    weights = (launched / "model" / "model.safetensors").read_bytes()
    cut, less = tmp_path / "cut", tmp_path / "less"
    shutil.copytree(launched, cut)
    for step in range(6, 13):
        shutil.rmtree(cut / f"checkpoint-{step}")
    shutil.rmtree(cut / "model")
    (cut / "report.html").unlink()
    shutil.copytree(cut, less)
    again = finish(start(torchrun("-m", "tunesmith", *words(place, cut, *KEPT, "--fsdp", "full_shard"))))
    assert again.code == 0, again.err[-3000:]
    assert [e.step for e in read_journal(RunDir(cut).journal_file) if isinstance(e, Resumed)] == [5]
    found = numbers(cut)
    assert {k: found[k] for k in found if k != "saved"} == {k: whole[k] for k in whole if k != "saved"}
    assert (cut / "model" / "model.safetensors").read_bytes() == weights
    refused = alone(*words(place, less, *KEPT))
    assert refused.code == 5
    assert "fsdp was 'full_shard' and is None; processes was 2 and is 1" in refused.err
    same_rows = ("--gradient_accumulation_steps", "2", "--restrict_vocabulary", "off", "--allow_changed_data")
    ended = alone(*words(place, less, *KEPT, *same_rows))
    assert ended.code == 0, ended.err
    notes = [e.text for e in read_journal(RunDir(less).journal_file) if isinstance(e, Note)]
    assert any("fsdp was 'full_shard' and is None" in text for text in notes)
    np.testing.assert_allclose(numbers(less)["losses"], whole["losses"], atol=1e-6, rtol=0)


def test_a_cut_vocabulary_on_one_side_is_refused_by_name(place: Path, launched: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(launched, run)
    shutil.rmtree(run / "model")
    refused = alone(*words(place, run, *KEPT, "--restrict_vocabulary", "on", "--allow_changed_data"))
    assert refused.code == 5
    assert "has a cut vocabulary on one side only (restrict_vocabulary, which fsdp switches off)" in refused.err


def test_what_fsdp_does_not_do_is_refused_before_anything_is_read(place: Path, tmp_path: Path) -> None:
    ended = alone(*words(place, tmp_path / "run", "--fsdp", "hybrid_shard", "--fsdp_config", '{"cpu_offload": true}'))
    assert ended.code == 2
    assert "fsdp hybrid_shard is not supported. Use full_shard" in ended.err
    assert "fsdp_config cpu_offload is not supported" in ended.err
    assert not (tmp_path / "run").exists()
