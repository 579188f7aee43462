"""Tasks of nine further packages, made before any run on them: kept for one look with a diagnosis that was fixed before.

    python bench/outside_tasks.py --sealed scratch/sealed

No package gives a task to another group (bench/outside_texts.py has those).
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from outside_texts import ONE, TWO, VALUE, Made, Rows, _frequent, _line, _pairs, fetch


def complaints(place: Path) -> Made:
    """What lintian complains about in packages: how severe it is."""
    rows: Rows = []
    for file in sorted(fetch(place, "deb", "lintian").rglob("*.tag")):
        text = file.read_text(encoding="utf-8")
        found = (
            re.search(r"^Severity: (\w+)", text, re.M),
            re.search(r"^Explanation:((?:.*\n?)(?: .*\n?)*)", text, re.M),
        )
        if found[0] and found[1]:
            rows.append((_line(re.sub(r"<[^>]*>", "", found[1][1])), found[0][1]))
    yield "complaint_severity", ONE, _frequent([row for row in rows if len(row[0]) > 30], 4)


def scripts(place: Path) -> Made:
    """Scripts of nmap: their categories, several each. Few rows."""
    rows: Rows = []
    for file in sorted(fetch(place, "deb", "nmap-common").rglob("*.nse")):
        text = file.read_text(encoding="utf-8", errors="replace")
        told = re.search(r"description\s*=\s*\[\[(.*?)\]\]", text, re.S)
        kinds = re.search(r"^categories\s*=\s*\{(.*?)\}", text, re.S | re.M)
        if told and kinds:
            names = sorted(set(re.findall(r"[\"'](\w+)[\"']", kinds[1])) & SCRIPT_KINDS)
            rows.append((_line(told[1]), "|".join(names)))
    yield "script_kinds", ONE, [row for row in rows if row[1]]


SCRIPT_KINDS = {"discovery", "safe", "intrusive", "vuln", "exploit", "brute", "auth", "default"}


def meanings(place: Path) -> Made:
    """Meanings of a dictionary of 1913: their field (zoology, law, ...)."""
    file = fetch(place, "deb", "dict-gcide") / "usr/share/dictd/gcide.dict.dz"
    text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
    found = re.findall(r"\(([A-Z][a-z]+\.)\)\s+((?:[^\[\n]+\n?)+)", text)
    rows = [(_line(re.sub(r"[{}]", "", meaning))[:300], field) for field, meaning in found]
    random.Random(4).shuffle(rows)
    yield "meaning_fields", ONE, _frequent([row for row in rows if len(row[0]) > 30], 14)[:6000]


def clouds(place: Path) -> Made:
    """Operations of web services: which service, and how many arguments they take."""
    operations: list[tuple[str, str, int]] = []
    for folder in sorted((fetch(place, "pypi", "botocore==1.34.0") / "botocore-1.34.0/botocore/data").iterdir()):
        files = sorted(folder.glob("*/service-2.json*")) if folder.is_dir() else []
        if not files:
            continue
        data = files[-1].read_bytes()
        listed: dict[str, Any] = json.loads(gzip.decompress(data) if files[-1].suffix == ".gz" else data)
        for operation in listed["operations"].values():
            text = _line(re.sub(r"<[^>]*>", " ", operation.get("documentation", "")))
            shape = listed["shapes"].get(operation.get("input", {}).get("shape", ""), {})
            if len(text) > 40:
                operations.append((text[:400], folder.name, len(shape.get("members", ()))))
    random.Random(5).shuffle(operations)
    yield "cloud_services", ONE, _frequent([(text, name) for text, name, _ in operations], 22)
    yield "cloud_arguments", VALUE, [(text, f"{math.log2(1 + count):.3f}") for text, _, count in operations]


def valences(place: Path) -> Made:
    """Words with how good or bad they sound, from -5 to 5."""
    file = fetch(place, "pypi", "afinn==0.1") / "afinn-0.1/afinn/data/AFINN-en-165.txt"
    cells = [line.rsplit("\t", 1) for line in file.read_text(encoding="utf-8").splitlines()]
    yield "word_valence", VALUE, [(word, value) for word, value in cells]


def companies(place: Path) -> Made:
    """Names of companies that make network cards: the country."""
    rows: dict[str, str] = {}
    for name in ("oui.csv", "mam.csv", "oui36.csv"):
        text = (fetch(place, "deb", "ieee-data") / "usr/share/ieee-data" / name).read_text(encoding="utf-8")
        for cells in csv.reader(text.splitlines()[1:]):
            country = re.findall(r"\b([A-Z]{2})\b", cells[3])
            if country:
                rows[_line(cells[2])] = country[-1]
    yield "company_countries", ONE, _frequent(list(rows.items()), 8)


def german(place: Path) -> Made:
    """German nouns: their gender; German words with their meaning in English, or with another one."""
    file = fetch(place, "deb", "dict-freedict-deu-eng") / "usr/share/dictd/freedict-deu-eng.dict.dz"
    text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
    found = re.findall(r"\n\n([^\n/<]+?) /[^\n/]*/ <(masc|fem|neut), n, sg>\n(?: \[[^\]\n]*\] ?)?([^\n<]+)", text)
    rows = list({word: (word, gender, _line(other)) for word, gender, other in found}.values())
    random.Random(6).shuffle(rows)
    yield "german_gender", ONE, [(word, gender) for word, gender, _ in rows[:6000]]
    pairs = [(word, other) for word, _, other in rows[6000:9000] if other]
    yield "german_english", TWO, _pairs([a for a, _ in pairs], [b for _, b in pairs], "same", "other")


def first_names(place: Path) -> Made:
    """First names: of women or men."""
    file = fetch(place, "pypi", "gender-guesser==0.4.0") / "gender-guesser-0.4.0/gender_guesser/data/nam_dict.txt"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    cells = [line.split()[:2] for line in lines if line[:2] in ("M ", "F ")]
    yield "name_gender", ONE, [(name.replace("+", " "), gender) for gender, name in cells]


def licenses(place: Path) -> Made:
    """Passages of licences: whether the Open Source Initiative approved of the licence (most it did not)."""
    rows: Rows = []
    for file in sorted((fetch(place, "npm", "spdx-license-list@6.12.0") / "package/licenses").glob("*.json")):
        told = json.loads(file.read_text(encoding="utf-8"))
        words = told["licenseText"].split()
        for at in range(0, min(len(words) - 60, 1200), 200):
            rows.append((" ".join(words[at : at + 60]), "yes" if told.get("osiApproved") else "no"))
    yield "license_approved", ONE, rows


SEALED: tuple[Callable[[Path], Made], ...] = (
    *(complaints, scripts, meanings, clouds, valences, companies, german, first_names, licenses),
)


def sealed_tasks(place: Path) -> Iterable[tuple[str, Sequence[str], Rows]]:
    """Name, columns and rows of every sealed task."""
    for source in SEALED:
        yield from source(place)
