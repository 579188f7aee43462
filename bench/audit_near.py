"""Near-duplicates planted across splits: how many are found, and how many other rows are reported.

    python bench/audit_near.py --tasks cr,r8,news6,sick

Half of a task's training texts are train, the other half validation; 300 validation rows are copies of train rows with one
change each. The threshold was chosen on trec, subj and mrpc; cr, r8, news6 and sick
(its sentences, each once) were not looked at. A row that was not planted
and is reported counts as false, although most of these are nearly equal texts of the data itself. Needs ../shared.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datasets import Dataset

from tunesmith.data.near_duplicates import find_near, survey_texts
from tunesmith.data.source import Part

SHARED = Path(os.environ.get("SHARED_DIR", "/work/shared"))
NAMES = ("Ann Lee", "J. Smith, Oslo", "sent from my phone", "Bob", "M. Rossi")


def edits(rng: random.Random, words: list[str]) -> dict[str, Callable[[str], str]]:
    """Name -> a change of one text."""

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
        "a word left out": drop,
        "two words swapped": swap,
        "a word replaced": change,
        "a word added": add,
        "punctuation left out": lambda text: "".join(c for c in text if c.isalnum() or c == " "),
        "first sentence or half moved to the end": turn,
        "signature added": lambda text: f"{text} -- {rng.choice(NAMES)}",
        "last tenth cut": lambda text: " ".join(text.split()[: max(3, int(len(text.split()) * 0.9))]),
    }


def main() -> None:
    """A line for each task and kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="cr,r8,news6,sick")
    parser.add_argument("--show", type=int, default=0, help="Print so many reported rows that were not planted.")
    args = parser.parse_args()
    for task in args.tasks.split(","):
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
        near = find_near(survey_texts(parts, ["text"]), half)[1]
        hit = near[half:] < half
        false, place = hit[: len(held)], len(held)
        for name, some in planted.items():
            print(f"{task:<6} {name:<22} {hit[place : place + len(some)].mean():.1%} found", flush=True)
            place += len(some)
        print(
            f"{task:<6} {'all planted':<22} {hit[len(held) :].mean():.1%} found, {false.mean():.2%} of {len(held)} other rows"
        )
        for row in np.flatnonzero(false)[: args.show]:
            print(f"    {held[row][:90]} ||| {train[near[half + row]][:90]}")


if __name__ == "__main__":
    main()
