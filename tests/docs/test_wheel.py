"""The wheel contains every package file, trains the demo outside the checkout, and requires torch only for training."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import BytesParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from patience import patient
from tiny_model import save_tiny_bert
from tunesmith.inference.export import RUNTIME_PACKAGES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy with the installed setuptools, without downloads."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77 or newer (extra dev)")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."], folder
    )
    return next((folder / "out").glob("tunesmith-*.whl"))


def asked_for(wheel: Path, extra: str) -> list[Requirement]:
    """Return the wheel's requirements with an extra ("" for none)."""
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("METADATA"))
    lines = BytesParser().parsebytes(archive.read(info)).get_all("Requires-Dist", [])
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": extra})]


def all_installed(asked: list[Requirement]) -> set[str]:
    """Return the installed packages that pip would install for these requirements, recursively."""
    found: set[str] = set()
    while asked:
        name = canonicalize_name(asked.pop().name)
        if name not in found:
            found.add(name)
            more = map(Requirement, distribution(name).requires or ())
            asked += [one for one in more if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def run(command: list[str], folder: Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(300), check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_contains_every_package_file(wheel: Path) -> None:
    package = ROOT / "src" / "tunesmith"
    files = {f"tunesmith/{p.relative_to(package).as_posix()}" for p in package.rglob("*") if p.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in files if "__pycache__" not in name} - names == set()
    info = next(name for name in names if name.endswith("METADATA"))
    assert b"Project-URL: Homepage" in zipfile.ZipFile(wheel).read(info)


@pytest.mark.slow
def test_wheel_trains_demo_in_clean_environment(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", "clean"], tmp_path)
    python = str(tmp_path / "clean" / "bin" / "python")
    # Dependencies come from this environment: editable installs are not found through a .pth file.
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
        tmp_path,
    )
    where = run([python, "-c", "import tunesmith; print(tunesmith.__file__)"], tmp_path)
    assert where.startswith(str(site))
    told = run([str(tmp_path / "clean" / "bin" / "tunesmith"), "demo", "--max_steps", "1"], tmp_path)
    assert "accuracy" in told
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()


@pytest.mark.slow
def test_runtime_installation_has_no_torch(wheel: Path) -> None:
    bare, runtime = asked_for(wheel, ""), asked_for(wheel, "runtime")
    assert {one.name for one in runtime} == {*RUNTIME_PACKAGES}, "requirements.txt of an export names the same"
    heavy = {"torch", "transformers", "datasets", "pyarrow", "pandas", "scipy", "scikit-learn", "matplotlib"}
    assert not heavy & (all_installed(runtime) | all_installed(bare))
    for extra in ("train", "demo", "export", "search", "trackers", "dev"):
        names = {str(one).partition(";")[0].strip() for one in asked_for(wheel, extra)}
        assert "torch>=2.10" in names or any(name.startswith("tunesmith[") for name in names), extra


@pytest.mark.slow
def test_installation_without_extras_names_training_extra(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", "clean"], tmp_path)
    python = str(tmp_path / "clean" / "bin" / "python")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    zipfile.ZipFile(wheel).extractall(site)
    for name in all_installed(asked_for(wheel, "")):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(found.locate_file(top)))
    (tmp_path / "rows.csv").write_text("text,label\ngood film,a\nbad film,b\n")
    save_tiny_bert(tmp_path / "model")
    before = sorted(tmp_path.iterdir())
    for verb in ("train", "plan", "audit"):
        words = ["-m", "tunesmith", verb, "--train_file", "rows.csv", "--model_name_or_path", "model"]
        done = subprocess.run([python, *words], cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (4, ""), done.stderr
        assert done.stderr.startswith(f"tunesmith: error: tunesmith {verb}: needs ")
        assert done.stderr.endswith(" is not installed. Run: pip install 'tunesmith[train]'\n")
    assert sorted(tmp_path.iterdir()) == before
    tried = "try:\n from tunesmith import Trainer\nexcept ImportError as error: print(error)"
    named = r"tunesmith\.Trainer: needs (torch|transformers), which is not installed\. Run: pip install 'tunesmith\[train\]'\n"
    assert re.fullmatch(named, run([python, "-c", tried], tmp_path)), "whichever of the two is imported first"
    assert "to train: pip install 'tunesmith[train]'" in run([python, "-m", "tunesmith", "doctor"], tmp_path)
