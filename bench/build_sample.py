"""Turn the authored groups (bench/sample_groups.jsonl) into the three CSV files of the bundled sample.

    python bench/build_sample.py [--check]

A group is one base sentence and four partners; it becomes four pairs, and in the training split two more that follow
from them (the close paraphrase with the free one and with the neighbor). Whole groups go to one split,
so no sentence crosses a split and every split has as many equivalent as non-equivalent pairs. The build is a pure
function of the groups file: `--check` rebuilds in memory and exits 1 if the CSV files on disk differ.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
GROUPS_FILE = HERE / "sample_groups.jsonl"
SAMPLE_DIR = HERE.parent / "src" / "tunesmith" / "sample"
SEED = 20240607
SHARES = {"validation": 0.12, "test": 0.18}  # the rest is training data
CELLS = {
    "pos_low": "equivalent",
    "pos_high": "equivalent",
    "neg_high": "not_equivalent",
    "neg_low": "not_equivalent",
}
FIELDS = ("base", *CELLS)
BASE_PAIRS = tuple(("base", cell, cell) for cell in CELLS)
# Two more true statements per group: cheap variety, used only in the training split.
TRAIN_PAIRS = (*BASE_PAIRS, ("pos_high", "pos_low", "pos_low"), ("pos_high", "neg_low", "neg_low"))
COLUMNS = ("sentence1", "sentence2", "label")

Group = dict[str, str]
Pair = dict[str, str]
Recipe = tuple[tuple[str, str, str], ...]  # field, field, cell that the pair is counted in


def read_groups(path: Path = GROUPS_FILE) -> list[Group]:
    """Return the authored groups in file order; raise ValueError with the line if a field is missing or a sentence repeats."""
    groups: list[Group] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        group = json.loads(line)
        if set(group) != {*FIELDS, "kind"}:
            raise ValueError(f"{path.name}:{number}: fields are {sorted(group)}")
        for field in FIELDS:
            key = " ".join(group[field].casefold().split())
            if not key or "\t" in group[field] or key in seen:
                raise ValueError(f"{path.name}:{number}: {field} is empty, has a tab or repeats line {seen.get(key)}")
            seen[key] = number
        groups.append(group)
    return groups


def assign_splits(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return groups by split name: seeded, with about the same share of every kind of change in each split."""
    by_kind: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_kind[group["kind"]].append(group)
    splits: dict[str, list[Group]] = {"train": [], "validation": [], "test": []}
    draw = random.Random(SEED)
    taken = dict.fromkeys(SHARES, 0)
    total = 0
    for kind in sorted(by_kind):
        members = sorted(by_kind[kind], key=lambda group: group["base"])
        draw.shuffle(members)
        total += len(members)
        # Cumulative rounding keeps the overall shares right even if a kind has few groups.
        for name, share in SHARES.items():
            count = round(total * share) - taken[name]
            taken[name] += count
            splits[name] += [members.pop() for _ in range(min(count, len(members)))]
        splits["train"] += members
    return splits


def make_pairs(groups: Iterable[Group], *, seed: str, recipe: Recipe = BASE_PAIRS) -> list[Pair]:
    """Return the shuffled pairs of all groups; a seeded coin decides which sentence comes first."""
    draw = random.Random(seed)
    pairs: list[Pair] = []
    for group in groups:
        for left, right, cell in recipe:
            first, second, label = group[left], group[right], CELLS[cell]
            if draw.random() < 0.5:
                first, second = second, first
            pairs.append({"sentence1": first, "sentence2": second, "label": label, "cell": cell, "kind": group["kind"]})
    draw.shuffle(pairs)
    return pairs


def build(path: Path = GROUPS_FILE) -> dict[str, list[Pair]]:
    """Return pairs by split, each with its cell and kind (which the CSV files omit)."""
    splits = assign_splits(read_groups(path))
    return {
        name: make_pairs(groups, seed=f"{SEED}-{name}", recipe=TRAIN_PAIRS if name == "train" else BASE_PAIRS)
        for name, groups in splits.items()
    }


def to_csv(pairs: Iterable[Pair]) -> str:
    """Return one split as CSV text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(pairs)
    return text.getvalue()


def main() -> int:
    """Write the CSV files, or with --check compare them; return 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare with the files on disk")
    check = parser.parse_args().check
    stale = False
    for name, pairs in build().items():
        path, text = SAMPLE_DIR / f"{name}.csv", to_csv(pairs)
        if check:
            same = path.exists() and path.read_bytes() == text.encode()
            stale |= not same
            print(f"{path.name}: {'up to date' if same else 'DIFFERS from the groups'}")
        else:
            path.write_bytes(text.encode())
            print(f"{path.name}: {len(pairs)} pairs")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
