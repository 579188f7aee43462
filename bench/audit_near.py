"""Plant near-duplicates across splits; measure the share that the audit finds and the share of other examples that it reports.

    python bench/audit_near.py [--tasks cr trec sick news6 r8] [--output docs/research/measurements/audit_near.json]

Half of a task's training texts go to train, the other half to validation. Up to 300 validation examples per kind of change are
copies of training texts with one change. The threshold was chosen on trec, cr and sick; r8 is held out. Reported examples
that were not planted count as false, although most are near-duplicates in the data itself. Needs ../shared.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from common import write_record
from tunesmith.data.audit import survey_texts
from tunesmith.data.rows import Part

SHARED = Path(os.environ.get("SHARED_DIR", "/work/shared"))
NAMES = ("Ann Lee", "J. Smith, Oslo", "sent from my phone", "Bob", "M. Rossi")


def edits(rng: random.Random, words: list[str]) -> dict[str, Callable[[str], str]]:
    """Return functions that change the words of a text, by name."""

    def typo(text: str) -> str:
        at, kind = rng.randrange(len(text) - 1), rng.random()
        if kind < 0.4:
            return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        return text[:at] + text[at + 1 :] if kind < 0.7 else text[:at] + rng.choice("abcdefghij") + text[at:]

    def drop(text: str) -> str:
        found = text.split()
        found.pop(rng.randrange(len(found)))
        return " ".join(found)

    def swap(text: str) -> str:
        found = text.split()
        at = rng.randrange(len(found) - 1)
        found[at], found[at + 1] = found[at + 1], found[at]
        return " ".join(found)

    def change(text: str) -> str:
        found = text.split()
        found[rng.randrange(len(found))] = rng.choice(words)
        return " ".join(found)

    def turn(text: str) -> str:
        found = text.split()
        at = next((i + 1 for i, word in enumerate(found[:-1]) if word.endswith((".", "!", "?"))), len(found) // 2)
        return " ".join(found[at:] + found[:at])

    def add(text: str) -> str:
        found = text.split()
        found.insert(rng.randrange(len(found) + 1), rng.choice(words))
        return " ".join(found)

    return {
        "case and punctuation": lambda text: text.upper().replace(" ,", ",").replace(" .", "!") + " !",
        "one typing error": typo,
        "two typing errors": lambda text: typo(typo(text)),
        "a word removed": drop,
        "two words swapped": swap,
        "a word replaced": change,
        "a word added": add,
        "punctuation removed": lambda text: "".join(c for c in text if c.isalnum() or c == " "),
        "first sentence or half moved to the end": turn,
        "signature added": lambda text: f"{text} -- {rng.choice(NAMES)}",
        "last tenth cut": lambda text: " ".join(text.split()[: max(3, int(len(text.split()) * 0.9))]),
    }


def main() -> None:
    """Print and write the shares for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["cr", "trec", "sick", "news6", "r8"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for task in args.tasks:
        rng = random.Random(0)
        file = SHARED / "data" / task / ("train_relatedness.tsv" if task == "sick" else "train.tsv")
        head, *lines = (line.split("\t") for line in file.read_text(encoding="utf-8").splitlines())
        at = [i for i, name in enumerate(head) if name in ("text", "sentence1", "sentence2")]
        texts = list(dict.fromkeys(t for line in lines for i in at if len((t := line[i]).split()) > 3))
        rng.shuffle(texts)
        half = len(texts) // 2
        train, held = texts[:half], texts[half:]
        kinds = edits(rng, [word for text in texts[:2000] for word in text.split()])
        planted = {name: [change(text) for text in rng.sample(train, min(300, half))] for name, change in kinds.items()}
        rows = held + [text for some in planted.values() for text in some]
        parts = {
            name: Part.of(Dataset.from_dict({"text": some, "labels": [0] * len(some)}), name)
            for name, some in (("train", train), ("validation", rows))
        }
        found = survey_texts(parts, ["text"]).near[half:] < half
        false, hits = float(found[: len(held)].mean()), found[len(held) :]
        by_kind = dict(
            zip(planted, np.split(hits, np.cumsum([len(some) for some in planted.values()])[:-1]), strict=True)
        )
        print(
            f"{task:<6} {hits.mean():.1%} of the planted examples found, {false:.2%} of {len(held)} others reported",
            flush=True,
        )
        shares = {name: round(float(some.mean()), 3) for name, some in by_kind.items()}
        results.append(
            {"task": task, "found": round(float(hits.mean()), 4), "others_reported": round(false, 4), "kinds": shares}
        )
    write_record(args.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
