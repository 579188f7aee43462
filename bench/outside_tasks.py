"""Tasks that no rule of this project was chosen on and that are not in ../shared: made of texts that Debian carries.

    apt-get update && apt-get install fortunes fortunes-min
    python bench/outside_tasks.py scratch/outside                      # writes scratch/outside/data/TASK/{train,test}.tsv

Package descriptions give the section (10 and 30 classes), whether a package is a game (5% are), what it is used for (several
labels a row), its size (a regression), and whether two descriptions come from one source package (pairs). The fortune files
give the topic of a quotation. `bench/outside_texts.py` adds tasks of further packages. The order of the rows is seeded; other
versions of the package lists give other rows.
`bench/recipe_tasks.py` and `bench/diagnose_tasks.py` find the folder as SHARED_DIR.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outside_sealed import sealed_tasks
from outside_texts import further_tasks

FORTUNES = Path("/usr/share/games/fortunes")
SECTIONS = ("python", "games", "science", "net", "web", "sound", "graphics", "devel", "text", "admin")
TOPICS = ("computers", "politics", "science", "work", "literature", "men-women", "definitions", "law", "food", "sports")
ROWS, TEST_ROWS, FEW_ROWS = 3000, 1500, 700
Rows = list[tuple[str, ...]]
"""The cells of each row, the label last."""


@dataclass(frozen=True)
class Package:
    """What the package list says of one package."""

    section: str
    source: str
    description: str
    kilobytes: int
    uses: tuple[str, ...]


def read_packages() -> list[Package]:
    """Every package with a description of its own, in the order of the list."""
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found: dict[str, Package] = {}
    for block in listed.split("\n\n"):
        unfolded = re.sub(r"\n ", " ", block)
        fields = dict(line.split(": ", 1) for line in unfolded.splitlines() if ": " in line)
        description = " ".join((fields.get("Description") or fields.get("Description-en") or "").split())
        if not description or "Section" not in fields or "Package" not in fields:
            continue
        tags = (tag.strip() for tag in fields.get("Tag", "").split(","))
        uses = tuple(sorted({tag.removeprefix("use::") for tag in tags if tag.startswith("use::")}))
        section, source = fields["Section"].split("/")[-1], fields.get("Source", fields["Package"]).split()[0]
        package = Package(section, source, description, int(fields.get("Installed-Size", 0)), uses)
        found.setdefault(description, package)
    return list(found.values())


def package_tasks(packages: Sequence[Package]) -> Iterator[tuple[str, Sequence[str], Rows]]:
    """Name, columns and rows of each task."""
    yield "sections", ("text", "label"), [(p.description, p.section) for p in packages if p.section in SECTIONS]
    frequent = {name for name, _ in Counter(p.section for p in packages).most_common(30)}
    short = [(" ".join(p.description.split()[:12]), p.section) for p in packages if p.section in frequent]
    yield "short_sections", ("text", "label"), short
    games, others = ([p for p in packages if (p.section == "games") == wanted] for wanted in (True, False))
    few, most = (ROWS + TEST_ROWS) // 20, (ROWS + TEST_ROWS) * 19 // 20
    rare = [(p.description, "game") for p in games[:few]] + [(p.description, "other") for p in others[:most]]
    yield "rare_games", ("text", "label"), rare
    common = {name for name, _ in Counter(use for p in packages for use in p.uses).most_common(8)}
    uses = [(p.description, "|".join(use for use in p.uses if use in common)) for p in packages]
    yield "uses", ("text", "label"), [row for row in uses if row[1]]
    sizes = [(p.description, f"{math.log10(p.kilobytes):.3f}") for p in packages if p.kilobytes > 0]
    yield "sizes", ("text", "score"), sizes
    yield "same_source", ("sentence1", "sentence2", "label"), _pairs(packages)


def _pairs(packages: Sequence[Package]) -> Rows:
    """Two descriptions of one source package, and the first of them with any other description."""
    by_source: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        by_source[package.source].append(package.description)
    pick = random.Random(1)
    made: Rows = []
    for found in by_source.values():
        if len(found) > 1:
            one, other = pick.sample(found, 2)
            made += [(one, other, "same"), (one, pick.choice(packages).description, "other")]
    return made


def fortune_rows() -> Rows:
    """Quotations with the name of the file they stand in."""
    rows: Rows = []
    for topic in TOPICS:
        texts = (FORTUNES / topic).read_text(encoding="utf-8").split("\n%\n")
        rows += [(" ".join(text.split()), topic) for text in texts if 20 < len(text) < 800]
    return rows


def write_task(folder: Path, name: str, columns: Sequence[str], rows: Rows) -> None:
    """Shuffles the rows and writes both splits: TSV without quoting."""
    random.Random(0).shuffle(rows)
    held_out = min(TEST_ROWS, len(rows) // 3)
    place = folder / "data" / name
    place.mkdir(parents=True, exist_ok=True)
    parts = {"test": rows[:held_out], "train": rows[held_out : held_out + ROWS]}
    if len(parts["train"]) < FEW_ROWS:  # a validation split of 400 rows would leave too few
        parts["validation"] = parts["train"][: len(parts["train"]) // 4]
        parts["train"] = parts["train"][len(parts["validation"]) :]
    for split, some in parts.items():
        lines = ["\t".join(columns), *("\t".join(cell.replace("\t", " ") for cell in row) for row in some)]
        (place / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(parts['train'])} / {held_out} rows")


def main() -> None:
    """Writes every task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sealed", action="store_true", help="write the tasks of bench/outside_sealed.py alone")
    args = parser.parse_args()
    folder = args.folder
    if args.sealed:
        for name, columns, rows in sealed_tasks(folder / "packages"):
            write_task(folder, name, columns, rows)
        return
    packages = read_packages()
    random.Random(0).shuffle(packages)
    for name, columns, rows in package_tasks(packages):
        write_task(folder, name, columns, rows)
    write_task(folder, "fortunes", ("text", "label"), fortune_rows())
    for name, columns, rows in further_tasks(folder / "packages"):
        write_task(folder, name, columns, rows)


if __name__ == "__main__":
    main()
