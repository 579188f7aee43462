"""How fast rows become tokens: our `tokenize` with threads and with processes, beside the `Dataset.map` of the course.

    python bench/tokenize_speed.py [--rows 60000] [--long 2000] [--model FOLDER]

Answers why `num_proc=None` is the default, and what counting the cut tokens exactly costs when every row is cut.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
company market report shares percent officials court government police president million against"""
SHARED = Path(__file__).resolve().parents[2] / "shared"


def make_rows(rows: int, words_a_text: int) -> Any:
    """Pairs of random English-looking sentences, always the same."""
    from datasets import Dataset

    rng = random.Random(0)
    words = re.findall(r"\w+", WORDS)
    first = [" ".join(rng.choices(words, k=rng.randint(words_a_text // 2, words_a_text))) + "." for _ in range(rows)]
    second = [" ".join(rng.choices(words, k=rng.randint(words_a_text // 2, words_a_text))) + "." for _ in range(rows)]
    return Dataset.from_dict({"sentence1": first, "sentence2": second, "labels": [i % 2 for i in range(rows)]})


def measure(work: Callable[[str], Any], repeats: int) -> float:
    """The median of a few runs, each with an empty cache folder."""
    times = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            work(folder)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def course_map(data: Any, tokenizer: Any, max_length: int, num_proc: int | None, folder: str) -> None:
    """What the course does: `map(fn, batched=True)` with truncation."""

    def encode(batch: dict[str, Any]) -> Any:
        return tokenizer(batch["sentence1"], batch["sentence2"], truncation=True, max_length=max_length)

    data.map(encode, batched=True, num_proc=num_proc, cache_file_name=f"{folder}/x.arrow", load_from_cache_file=False)


def main() -> None:
    """Prints a table."""
    import datasets
    from transformers import AutoTokenizer

    from tunesmith.data.tokenize import tokenize

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--long", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default=str(SHARED / "models" / "paraphrase-MiniLM-L3-v2"))
    args = parser.parse_args()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    cores = os.cpu_count() or 1
    text = ("sentence1", "sentence2")
    print(f"{platform.processor() or platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}")
    for title, data, max_length in (
        (f"{args.rows} pairs of about 40 tokens, nothing cut", make_rows(args.rows, 25), 512),
        (f"{args.long} pairs of about 1500 tokens, all cut at 128", make_rows(args.long, 1000), 128),
    ):
        print(f"\n{title}")

        def ours(num_proc: int | None, folder: str, data: Any = data, max_length: int = max_length) -> Any:
            return tokenize(data, tokenizer, text, max_length=max_length, num_proc=num_proc, cache_dir=folder)

        def theirs(num_proc: int | None, folder: str, data: Any = data, max_length: int = max_length) -> None:
            course_map(data, tokenizer, max_length, num_proc, folder)

        ways: list[tuple[str, Callable[[str], Any]]] = [
            ("tunesmith, Rust threads (default)", lambda folder: ours(None, folder)),
            (f"tunesmith, num_proc={cores}", lambda folder: ours(cores, folder)),
            ("Dataset.map of the course, threads", lambda folder: theirs(None, folder)),
            (f"Dataset.map of the course, num_proc={cores}", lambda folder: theirs(cores, folder)),
        ]
        for name, work in ways:
            seconds = measure(work, args.repeats)
            print(f"  {name:<42} {seconds:7.2f} s  {len(data) / seconds:9.0f} rows/s")
        with tempfile.TemporaryDirectory() as folder:
            ours(None, folder)
            began = time.perf_counter()
            assert ours(None, folder).reused
            print(f"  {'tunesmith, second run (from the cache)':<42} {time.perf_counter() - began:7.2f} s")


if __name__ == "__main__":
    main()
