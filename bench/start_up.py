"""Where do the seconds of whole commands go, from Enter to prompt? `tunesmith bench --start_up` on MRPC.

    python bench/start_up.py --shape bert-base --rounds 2 --output start_up_h200.json

The files of MRPC stand in scratch/mrpc (train.tsv, validation.tsv), a tokenizer in scratch/minilm. With a shape, the model has
random weights and is made first; without one it is all-MiniLM-L6-v2, and `--rows 64 --max_steps 2` is the smallest run. After
`--seconds` the measurement is ended, and the file has what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def measure(words: list[str], seconds: float | None) -> bool:
    """Runs `tunesmith bench --start_up`; whether it came to its end before the time was over."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", "bench", "--start_up", *words], start_new_session=True
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the command that it is measuring
        process.wait()
        return False


def main() -> None:
    """Runs the command and writes its numbers with date and machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--model", help="a folder with a model; --shape makes one")
    parser.add_argument("--data", type=Path, default=ROOT / "scratch" / "mrpc")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "scratch" / "minilm")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--script_rounds", type=int, help="rounds of the script, where it takes a minute")
    parser.add_argument("--against", nargs="*", default=["script"])
    parser.add_argument(
        "--filled_by", type=int, metavar="STEPS", help="caches are filled by runs of so many steps alone"
    )
    parser.add_argument("--seconds", type=float, help="ended after so many, the filling run included")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = args.data / "train.tsv"
        if args.rows is not None:
            lines = train.read_text(encoding="utf-8").splitlines()[: args.rows + 1]
            train = folder / "train.tsv"
            train.write_text("\n".join(lines) + "\n", encoding="utf-8")
        words = ["--train_file", str(train), "--per_device_train_batch_size", str(args.batch)]
        if args.rows is None:
            words += ["--validation_file", str(args.data / "validation.tsv")]
        model = make_model(args.shape, args.tokenizer, folder / args.shape) if args.shape else args.model
        words += ["--model_name_or_path", str(model)] if model else []
        if args.max_steps:
            words += ["--max_steps", str(args.max_steps)]
        words += ["--filled_by", str(args.filled_by)] if args.filled_by else []
        words += ["--script_rounds", str(args.script_rounds)] if args.script_rounds else []
        words += ["--rounds", str(args.rounds), "--against", *args.against, "--json", str(folder / "out.json")]
        left = None if args.seconds is None else args.seconds - (time.monotonic() - began)
        whole = measure(words, left)
        found = json.loads((folder / "out.json").read_text())
    command = " ".join(["bench/start_up.py", *sys.argv[1:]])
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": name_of_machine(), "command": command}
    facts |= {} if whole else {"note": "the time was over before all rounds were measured"}
    facts["versions"] = {**found.pop("versions"), "python": platform.python_version()}
    if args.output:
        args.output.write_text(json.dumps({**facts, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
