"""The wheel holds every file of the package and trains the demo in an environment of its own, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from patience import patient

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with the setuptools that is here: nothing is downloaded."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77 or newer (extra dev)")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."], folder
    )
    return next((folder / "out").glob("tunesmith-*.whl"))


def run(command: list[str], folder: Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(300), check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    package = ROOT / "src" / "tunesmith"
    files = {f"tunesmith/{p.relative_to(package).as_posix()}" for p in package.rglob("*") if p.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in files if "__pycache__" not in name} - names == set()
    info = next(name for name in names if name.endswith("METADATA"))
    assert b"Project-URL: Homepage" in zipfile.ZipFile(wheel).read(info)


@pytest.mark.slow
def test_the_wheel_trains_the_demo_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", "clean"], tmp_path)
    python = str(tmp_path / "clean" / "bin" / "python")
    # The dependencies are those of this environment: a path in a .pth file is not searched for editable installs.
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
