"""`load_dataset` with the real `datasets` client against a Hub on loopback. Each `client` is a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hub.conftest import call
from patience import patient

pytestmark = pytest.mark.slow
NAMES = ["not_equivalent", "equivalent"]
MRPC = {"train": [3000, NAMES, [0, 1, 0]], "validation": [8, NAMES, [0, 1, 0]], "test": [9, NAMES, [-1, -1, -1]]}
TRAIN = "mrpc/train-00000-of-00001.parquet"
NOBODY = "http://127.0.0.1:9"


def test_dataset_is_downloaded_once_and_loads_offline(hub: Any, client: Any) -> None:
    [cold] = client(call("splits", "glue", "mrpc"))
    assert cold.value == MRPC
    assert len([d for d in hub.downloads() if d.startswith("/storage/")]) == 3
    hub.seen.clear()
    [warm] = client(call("splits", "nyu-mll/glue", "mrpc"))
    assert warm.value == MRPC
    assert hub.downloads() == []
    hub.seen.clear()
    [offline] = client(call("splits", "glue", "mrpc"), HF_DATASETS_OFFLINE="1")
    assert offline.value == MRPC
    assert hub.seen == []
    [unreachable] = client(call("splits", "glue", "mrpc"), HF_ENDPOINT=NOBODY)
    assert unreachable.value == MRPC
    assert unreachable.seconds < patient(5)  # `load_dataset` without tunesmith retries for 25 s


def test_unreachable_hub_without_copy_is_reported_in_one_line(client: Any) -> None:
    [down] = client(call("splits", "glue", "mrpc"), HF_ENDPOINT=NOBODY)
    assert down.error == "ResourceError"
    assert down.line.startswith("the dataset glue (mrpc) is not on this machine and the Hub cannot be reached")
    assert "\n" not in down.line
    assert down.seconds < patient(5)
    [offline] = client(call("splits", "glue", "mrpc"), HF_HUB_OFFLINE="1")
    assert "is not on this machine and offline mode is on" in offline.line


def test_wrong_name_error_suggests_nearest_name(client: Any) -> None:
    name, config, several = client(
        call("splits", "gleu", "mrpc"), call("splits", "glue", "mrcp"), call("splits", "glue")
    )
    assert {a.error for a in (name, config, several)} == {"ConfigError"}
    assert name.line == "there is no Hub dataset named 'gleu'. Did you mean 'glue'?"
    listed = "Set --dataset_config_name to one of: mrpc, broken"
    assert config.line == f"the dataset nyu-mll/glue has no config 'mrcp'. Did you mean 'mrpc'? {listed}"
    assert several.line == f"the dataset nyu-mll/glue has several configs. {listed}"


def test_missing_files_raise_and_renamed_dataset_loads(hub: Any, client: Any) -> None:
    hub.renamed[("datasets", "oldglue")] = "nyu-mll/glue"
    broken, whole = client(call("splits", "glue", "broken"), call("splits", "oldglue", "mrpc"))
    assert broken.error == "DataError"
    assert broken.line.startswith("the dataset nyu-mll/glue (broken) has no data files")
    assert whole.value == MRPC


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_damaged_repository_raises_data_error(hub: Any, client: Any, damage: str) -> None:
    files = hub.repos[("datasets", "nyu-mll/glue")].files
    if damage == "gone":
        del files[TRAIN]
    else:
        files[TRAIN] = files[TRAIN][:-2000]
    [answer] = client(call("splits", "glue", "mrpc"))
    assert answer.error == "DataError"
    assert "nyu-mll/glue" in answer.line
    assert ("no data files" if damage == "gone" else "cannot be read") in answer.line
    assert "\n" not in answer.line


def test_dropped_connection_raises_and_retry_succeeds(hub: Any, client: Any, tmp_path: Path) -> None:
    hub.cut[TRAIN] = 2000
    [broken] = client(call("splits", "glue", "mrpc"))
    assert broken.error == "ResourceError"
    assert broken.line.startswith("the download of the dataset nyu-mll/glue was interrupted")
    assert "\n" not in broken.line
    assert list((tmp_path / "hf" / "datasets").rglob("*.arrow")) == []
    hub.cut.clear()
    [unused] = client(call("splits", "glue", "mrpc"), HF_HUB_OFFLINE="1")
    assert unused.error == "ResourceError"  # incomplete files are not used
    [whole] = client(call("splits", "glue", "mrpc"))
    assert whole.value == MRPC


def test_leftovers_of_killed_process_are_ignored(client: Any, tmp_path: Path) -> None:
    [first] = client(call("splits", "glue", "mrpc"))
    assert first.value == MRPC
    [info] = (tmp_path / "hf" / "datasets").rglob("dataset_info.json")
    stump = info.parent.with_name("f" * 40 + ".incomplete")
    stump.mkdir()
    (stump / "dataset_info.json").write_text("{}")
    info.parent.with_name("e" * 40).mkdir()
    [offline] = client(call("splits", "glue", "mrpc"), HF_HUB_OFFLINE="1")
    assert offline.value == MRPC
