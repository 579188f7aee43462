"""`tunesmith export`: exports match the original and run without torch; bad graphs are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunesmith
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.errors import CheckpointError, ConfigError, NumericsError, ResourceError
from tunesmith.inference import export
from tunesmith.inference.export import EvidenceRows, Tolerance, check_candidate, export_model_to, rows_of_run
from tunesmith.inference.predictor import Predictor
from tunesmith.pipeline.train import finetune
from tunesmith.runs.folder import RunDir

TEXTS = [text for text, _ in sentences(40, 7)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with an ONNX export in run/export/onnx; tracing takes seconds."""
    folder = tmp_path_factory.mktemp("home")
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(200)]
    finetune(
        train_file=write_csv(folder / "train.csv", rows),
        model_name_or_path=save_tiny_bert(folder / "tiny"),
        output_dir=folder / "run",
        cache_dir=folder / "cache",
        num_train_epochs=6,
        learning_rate=3e-3,
        use_cpu=True,
    )
    assert main(["export", str(folder / "run"), "--to", "onnx"]) == 0
    return folder


@pytest.fixture
def traced(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the run; exports reuse the graph of the first one instead of tracing again."""
    graph = home / "run" / "export" / "onnx" / "onnx" / "model.onnx"
    monkeypatch.setattr(export, "write_onnx", lambda model, names, path: shutil.copyfile(graph, path))
    return home / "run"


def test_export_matches_run_and_standard_layout(home: Path) -> None:
    folder = home / "run" / "export" / "onnx"
    ours, theirs = Predictor.load(home / "run", use_cpu=True), Predictor.load(folder)
    assert theirs.network.name == "onnxruntime on cpu"
    assert np.abs(ours.probabilities(TEXTS) - theirs.probabilities(TEXTS)).max() < 1e-4
    assert ours.predict(TEXTS) == theirs.predict(TEXTS)
    assert theirs.predict("a film") == theirs.predict(["a film"])
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert config["problem_type"] == "single_label_classification"
    assert {"tokenizer.json", "onnx", "README.md", "export.json"} <= {p.name for p in folder.iterdir()}
    measured = json.loads((folder / "export.json").read_text())["measured"]
    assert measured["tried"][0]["agreement"] == 1
    assert measured["tried"][0]["score"]["low"] is not None
    card = (folder / "README.md").read_text()
    assert "| onnx |" in card
    assert "library_name: onnx\n" in card
    assert "transformers import" not in card, "transformers cannot load a graph"
    assert "pip install 'tunesmith[runtime]'`" in card
    assert "| train | 180 | " in card
    assert "## Limits" in card


def test_modified_graph_is_not_loaded(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "run" / "export" / "onnx", tmp_path / "onnx")
    graph = folder / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="sha256 differs"):
        Predictor.load(folder)


def test_int8_export_keeps_the_labels(traced: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(traced, use_cpu=True)
    rows = rows_of_run(RunDir(traced), predictor.facts)
    assert rows.split == "validation"
    for name in (".tmp-int8-999999999", ".tmp-gone-int8-999999999"):  # left by killed exports
        (tmp_path / name).mkdir()
    done = export_model_to(traced, "onnx-int8", tmp_path / "int8", rows)
    assert done.checked.refused is None
    assert done.checked.agreement >= 0.99
    found, expected = Predictor.load(tmp_path / "int8").probabilities(TEXTS), predictor.probabilities(TEXTS)
    assert np.abs(found - expected).max() < 0.02
    clear = np.abs(expected[:, 0] - 0.5) > 0.02  # a label can only change close to the threshold
    assert clear.sum() > 30
    assert (found.argmax(1) == expected.argmax(1))[clear].all()
    assert b"MatMulInteger" in (tmp_path / "int8" / "onnx" / "model.onnx").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["int8"], "no temporary folder is left"
    assert not (tmp_path / "int8" / "scratch").exists()


def test_full_disk_during_export_is_a_resource_error(
    traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any, names: list[str], path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("write failed: No space left on device")

    monkeypatch.setattr(export, "write_onnx", fail)
    rows = rows_of_run(RunDir(traced), Predictor.load(traced, use_cpu=True).facts)
    with pytest.raises(ResourceError, match=r"onnx: cannot be written: No space left on device \(.* MB free"):
        export_model_to(traced, "onnx", tmp_path / "onnx", rows)
    assert list(tmp_path.iterdir()) == []


def test_graph_that_needs_too_much_memory_is_a_resource_error(home: Path, tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    folder = shutil.copytree(home / "run" / "export" / "onnx", tmp_path / "onnx")
    (folder / "MANIFEST.json").unlink()
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["rows", "length"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("Mul", ["shape", "factor"], ["large"]),
        helper.make_node("ConstantOfShape", ["large"], ["logits"]),
    ]
    factor = helper.make_tensor("factor", TensorProto.INT64, [2], [10**9, 10**7])
    graph = helper.make_graph(nodes, "large", [ids], [logits], [factor])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        folder / "onnx" / "model.onnx",
    )
    with pytest.raises(ResourceError, match="onnxruntime is out of memory"):
        Predictor.load(folder).predict("a film")


def test_unsupported_export_format_is_refused_by_name(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "run" / "export" / "onnx", tmp_path / "onnx")
    (folder / "MANIFEST.json").unlink()
    facts = json.loads((folder / "export.json").read_text())
    (folder / "export.json").write_text(json.dumps({**facts, "format": "openvino"}))
    with pytest.raises(ConfigError, match=r"format 'openvino' is not supported.*--to onnx"):
        Predictor.load(folder)


def test_bad_quantization_is_refused_and_leaves_nothing(
    traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(graph: Path, to: Path) -> None:
        import onnx
        from onnx import numpy_helper

        model = onnx.load(str(graph))
        for tensor in model.graph.initializer:
            value = numpy_helper.to_array(tensor)
            if value.ndim == 2 and value.dtype == np.float32:
                tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value[::-1]), tensor.name))
        onnx.save(model, str(to))

    monkeypatch.setattr(export, "QUANTIZATIONS", {"planted": spoil})
    rows = rows_of_run(RunDir(traced), Predictor.load(traced, use_cpu=True).facts)
    with pytest.raises(NumericsError, match=r"planted: \w+ drops by 0\.\d+; --max_drop is 0\.005"):
        export_model_to(traced, "onnx-int8", tmp_path / "bad", rows)
    assert list(tmp_path.iterdir()) == []


def test_export_with_many_changed_labels_needs_permission(traced: Path) -> None:
    facts = Predictor.load(traced, use_cpu=True).facts
    before = np.tile(np.array([[2.0, -2.0], [-2.0, 2.0]], dtype=np.float32), (100, 1))
    after = before.copy()
    after[
        [0, 1, 2, 3]
    ] *= -1  # two errors become correct and two labels become errors: equal score, 2% of the labels change
    truth = np.tile([0, 1], 100)
    truth[[0, 2]] = 1
    rows = EvidenceRows("test", [TEXTS], truth)
    strict = check_candidate("int8", after, before, rows, facts, Tolerance())
    assert strict.refused == "98.00% of the labels are equal; --min_agreement is 0.99"
    assert check_candidate("int8", after, before, rows, facts, Tolerance(min_agreement=0.97)).refused is None


@pytest.fixture
def bare(home: Path, tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the base interpreter (-S) finds only the packages of requirements.txt."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "tunesmith").symlink_to(Path(tunesmith.__file__).parent)
    lines = (home / "run" / "export" / "onnx" / "requirements.txt").read_text().splitlines()
    for name, _, pinned in (line.partition("==") for line in lines[2:]):
        found = distribution(name)
        assert found.version == pinned
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(found.locate_file(top)))
    return {"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}


def test_export_predicts_with_only_its_requirements(home: Path, tmp_path: Path, bare: dict[str, str]) -> None:
    folder = home / "run" / "export" / "onnx"
    file = write_csv(tmp_path / "new.csv", [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)])
    code = f"""
import sys
from importlib.util import find_spec
assert not any(map(find_spec, ("torch", "transformers", "datasets", "pyarrow", "sklearn", "scipy", "pandas")))
from tunesmith import Predictor
print(" ".join(Predictor.load({str(folder)!r}).predict({TEXTS!r})))
from tunesmith.cli.main import main
from tunesmith.inference.server import make_app
from tunesmith.inference.service import PredictionService
PredictionService({str(folder)!r}).load()
code = main(["predict", {str(folder)!r}, "--input", {str(file)!r}, "--output", {str(tmp_path / "out.csv")!r}])
sys.exit(code or main(["predict", {str(home / "run")!r}, "--text", "a"]) - 4)
"""
    command = [sys._base_executable, "-S", "-c", code]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = Predictor.load(home / "run", use_cpu=True).predict(TEXTS)
    assert done.stdout.split() == expected
    assert [line.split(",")[2] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]] == expected
    assert (
        "needs torch, which is not installed. Run: pip install 'tunesmith[train]', or export the model" in done.stderr
    )
    left = {file.relative_to(tmp_path).parts[:2] for file in (tmp_path / ".cache").rglob("*") if file.is_file()}
    assert left <= {(".cache", "tunesmith")}, "onnxruntime kept an identifier to report its use with"


def test_served_export_hides_its_key_and_printed_command_works(home: Path, tmp_path: Path) -> None:
    folder = home / "run" / "export" / "onnx"
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tunesmith", "serve", str(folder), "--port", "0"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    server.stdout.readline()
    printed = "".join(server.stdout.readline() for _ in range(3))
    key = (tmp_path / "tunesmith" / "serve-key").read_text()
    assert len(key) >= 40
    assert key not in printed, "stdout can be a log file"
    said = subprocess.run(["sh", "-c", printed], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["results"][0]["label"] in ("good", "bad")
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) == 143
    server.stdout.close()
