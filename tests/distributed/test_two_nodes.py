"""`torchrun --nnodes 2` in two network namespaces that share only the disk equals two ranks on one node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.launching import Ended, finish, start, torchrun
from patience import patient
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.events import Resumed, StepDone
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir

pytestmark = pytest.mark.slow
ENTER = Path(__file__).with_name("enter_node.py")
FIRST, SECOND = "10.99.0.1", "10.99.0.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=patient(20))


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    """Create two connected network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 to make network namespaces")
    names = (f"node0-{os.getpid()}", f"node1-{os.getpid()}")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here ({error.stderr.decode().strip()})")
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=patient(20))


def on_nodes(nodes: tuple[str, str], *words: str, fault: str = "") -> list[Ended]:
    """Run the command on both nodes with one rank each, and a fault on the second."""
    launchers = []
    for node, address in zip(nodes, (FIRST, SECOND), strict=True):
        host = f"is_host={int(address == FIRST)}"  # names are not resolved here
        rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{FIRST}:29500", "--rdzv_id", "test"]
        rendezvous += ["--rdzv_conf", host]
        launcher = (sys.executable, str(ENTER), node, "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1")
        command = [*launcher, *rendezvous, "--local_addr", address, str(ENTER), node, "tunesmith", *words]
        faults = {"TUNESMITH_FAULT": fault} if fault and node == nodes[1] else {}
        launchers.append(start(command, GLOO_SOCKET_IFNAME="cable", TP_SOCKET_IFNAME="cable", **faults))
    return [finish(launcher, 200) for launcher in launchers]


def losses(run: Path) -> list[float]:
    return [e.loss for e in read_journal(RunDir(run).journal_file) if isinstance(e, StepDone)]


def test_two_nodes_equal_one_even_after_a_node_is_lost(nodes: tuple[str, str], tmp_path: Path) -> None:
    save_tiny_bert(tmp_path / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(62)]
    write_csv(tmp_path / "train.csv", rows[:41])
    write_csv(tmp_path / "validation.csv", rows[41:])

    def words(run: str, *more: str) -> list[str]:
        return [
            *("train", "--train_file", str(tmp_path / "train.csv")),
            *("--validation_file", str(tmp_path / "validation.csv")),
            *("--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / run), "--use_cpu"),
            *("--per_device_train_batch_size", "4", "--num_train_epochs", "2", "--learning_rate", "1e-3"),
            *("--recipe", "hf"),
            *("--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "9"),
            *("--cache_dir", str(tmp_path / "cache"), *more),
        ]

    ended = finish(start(torchrun("-m", "tunesmith", *words("one"))))
    assert ended.code == 0, ended.err[-3000:]
    lost = on_nodes(nodes, *words("two"), fault="step.end:kill:7")
    assert [one.code for one in lost] == [1, 1], "torchrun itself ends with 1"
    assert "no longer responds" in lost[0].err + lost[1].err, lost
    for one in on_nodes(nodes, *words("two")):
        assert one.code == 0, one.err[-3000:]
    assert [e.step for e in read_journal(RunDir(tmp_path / "two").journal_file) if isinstance(e, Resumed)] == [6]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("one", "two")]
    assert weights[0] == weights[1]
