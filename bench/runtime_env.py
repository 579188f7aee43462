"""An exported folder in a virtual environment that truly has no torch: size, import time, first answer, equal labels.

python bench/runtime_env.py RUN/export/onnx RUN TEXTS.csv
Makes the environment in a temporary folder (needs a package index), installs this checkout without its dependencies and the five
packages that prediction uses, and compares the answers with those of the run in this environment.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("onnxruntime", "tokenizers", "numpy", "starlette", "uvicorn")
IMPORT = "import time; t = time.perf_counter(); from tunesmith import Predictor; print(time.perf_counter() - t)"


def main() -> int:
    """Prints one table; 1 when an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exported")
    parser.add_argument("run")
    parser.add_argument("texts", help="csv with the text columns of the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "env"
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        install = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        before = size_of(home)
        subprocess.run([*install, *PACKAGES], check=True)
        subprocess.run([*install, "--no-deps", str(ROOT)], check=True)
        python = str(home / "bin" / "python")
        for name in ("torch", "transformers", "datasets", "pyarrow"):
            assert subprocess.run([python, "-c", f"import {name}"], stderr=subprocess.DEVNULL).returncode != 0, name
        installed = size_of(home) - before
        imported = float(subprocess.run([python, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)
        start = time.perf_counter()
        subprocess.run(
            [python, "-m", "tunesmith", "predict", args.exported, "--text", "a"], check=True, capture_output=True
        )
        first = time.perf_counter() - start
        theirs = labels(python, args.exported, args.texts, Path(folder) / "theirs.csv")
    with tempfile.TemporaryDirectory() as folder:
        ours = labels(sys.executable, args.run, args.texts, Path(folder) / "ours.csv")
    print("| what | value | goal |\n|---|---|---|")
    print(f"| installed besides the model | {installed / 1e6:.0f} MB | under 150 MB |")
    print(f"| import | {imported:.2f} s | under 0.5 s |")
    print(f"| start to first answer | {first:.2f} s | 1 s |")
    print(f"| equal labels | {sum(a == b for a, b in zip(ours, theirs, strict=True))} of {len(ours)} | all |")
    return int(ours != theirs)


def labels(python: str, model: str, texts: str, output: Path) -> list[str]:
    """The predicted labels of a csv file."""
    command = [python, "-m", "tunesmith", "predict", model, "--input", texts, "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    with output.open(newline="", encoding="utf-8") as lines:
        return [row["prediction"] for row in csv.DictReader(lines)]


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


if __name__ == "__main__":
    raise SystemExit(main())
