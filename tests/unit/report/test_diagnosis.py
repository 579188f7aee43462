"""The diagnosis of a run folder: whether the run is still in training, and how a verdict is shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tunesmith.report.build import build_report, diagnose_run
from tunesmith.runs.folder import RunDir
from tunesmith.runs.lock import RunLock

FALLING = {"train": [0.60, 0.52, 0.42], "validation": [0.59, 0.52, 0.44], "accuracy": [0.69, 0.74, 0.80]}


def test_a_run_under_way_is_still_learning_until_its_process_is_gone(
    tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    synthetic.make_folder(tmp_path, synthetic.make_run(**FALLING, planned_epochs=9, ended=None))
    with RunLock(RunDir(tmp_path).lock_file):
        assert diagnose_run(tmp_path)[0].code == "still_learning"
        assert build_report(tmp_path).findings[0].code == "still_learning"
    assert diagnose_run(tmp_path)[0].code == "stopped_too_early"
