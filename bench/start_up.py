"""Wall-clock time of whole commands on MRPC, from start to prompt: `tunesmith train` and a script with transformers.

    python bench/start_up.py --shape bert-base --rounds 2 --output start_up_h200.json

MRPC is read from scratch/mrpc (train.tsv, validation.tsv), the tokenizer from scratch/minilm. With a shape, the model has
random weights; without one it is all-MiniLM-L6-v2, and `--rows 64 --max_steps 2` is the smallest run. The first round of
each command fills the caches and is not part of the median. The output file is written after each round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tunesmith.models.files import find_embedded

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
}


def make_model(shape: str, tokenizer: Path, folder: Path) -> Path:
    """A BERT of this shape with random weights and the tokenizer of all-MiniLM-L6-v2."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=30522, **SHAPES[shape])).save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(tokenizer / "vocab.txt", folder)
    return folder


def name_of_machine() -> str:
    """The GPU, or the number of cores; without loading torch."""
    if shutil.which("nvidia-smi") is None:
        return f"CPU, {os.cpu_count()} cores"
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def commands(args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Return the words of each command that is timed; {out} stands for its output folder."""
    train = args.data / "train.tsv"
    if args.rows is not None:
        lines = train.read_text(encoding="utf-8").splitlines()[: args.rows + 1]
        train = folder / "train.tsv"
        train.write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = {"train_file": str(train)}
    if args.rows is None:
        files["validation_file"] = str(args.data / "validation.tsv")
    options: dict[str, object] = {"per_device_train_batch_size": args.batch}
    if args.max_steps:
        options["max_steps"] = args.max_steps
    model = make_model(args.shape, args.tokenizer, folder / args.shape) if args.shape else args.model
    ours = [word for name, value in {**files, **options}.items() for word in (f"--{name}", str(value))]
    ours += ["--model_name_or_path", str(model)] if model else []
    script = {
        **files,
        "text_columns": ["sentence1", "sentence2"],
        "label_column": "label",
        "model": str(model or find_embedded()),
        "seed": 42,
        "max_length": 512,
        "cache_dir": str(folder / "datasets"),
        "output_dir": "{out}",
        "arguments": options,
    }
    words = {"train": ["-m", "tunesmith", "train", *ours, "--output_dir", "{out}"]}
    for kind, more in {"script": {}, "script_bf16": {"bf16": True}}.items():
        given = json.dumps({**script, "arguments": {**options, **more}})
        words[kind] = [str(ROOT / "bench" / "glue_script.py"), given]
    return words


def main() -> None:
    """Time the commands in turns; print and write the seconds of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--model", help="folder of a model; --shape makes one")
    parser.add_argument("--data", type=Path, default=ROOT / "scratch" / "mrpc")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "scratch" / "minilm")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--against", nargs="*", default=["script"], choices=["script", "script_bf16"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    versions = {name: version(name) for name in ("torch", "transformers", "datasets")}
    command = " ".join(["bench/start_up.py", *sys.argv[1:]])
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": name_of_machine(), "command": command}
    facts["versions"] = {**versions, "python": platform.python_version()}
    seconds: dict[str, list[float]] = {kind: [] for kind in ("train", *args.against)}
    with tempfile.TemporaryDirectory() as name:
        words = commands(args, Path(name))
        for number in range(args.rounds + 1):
            for kind, rounds in seconds.items():
                out = str(Path(name) / f"{kind}-{number}")
                began = time.monotonic()
                typed = [sys.executable, *(word.replace("{out}", out) for word in words[kind])]
                subprocess.run(typed, check=True, stdout=subprocess.DEVNULL)
                rounds.append(round(time.monotonic() - began, 2))
                print(f"{kind}, round {number}: {rounds[-1]:.1f} s", flush=True)
                found = {k: {"seconds": r, "median": statistics.median(r[1:] or r)} for k, r in seconds.items() if r}
                if args.output:
                    args.output.write_text(json.dumps({**facts, "commands": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
