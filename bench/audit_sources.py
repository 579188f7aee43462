"""More texts from elsewhere for bench/audit_near.py and bench/audit_labels.py: glosses, lines of manuals, rated sentences.

    apt-get install wordnet-base && pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python bench/audit_sources.py scratch/outside vaderSentiment-3.3.2.tar.gz

writes scratch/outside/data/TASK/{train,test}.tsv: the kind of thing that a WordNet gloss describes (10 labels), the section of
the manual that a page of this machine stands in, and whether a tweet or a sentence of a review or an editorial was rated above 0
(the sources of vaderSentiment). `bench/outside_tasks.py` writes the others there.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from outside_tasks import Rows, write_task

NOUNS = Path("/usr/share/wordnet/data.noun")
KINDS = {4: "act", 6: "artifact", 7: "attribute", 9: "cognition", 10: "communication"}
KINDS |= {13: "food", 15: "location", 18: "person", 26: "state", 27: "substance"}
RATED = {"vtweet": "tweets", "vamazon": "amazonReviewSnippets", "vmovie": "movieReviewSnippets"}
RATED |= {"vnyt": "nytEditorialSnippets"}
ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"


def glosses() -> Rows:
    """What a noun means, without its examples, and the kind of thing it is."""
    lines = [line for line in NOUNS.read_text(encoding="utf-8").splitlines() if not line.startswith(" ")]
    cut = [line.split(" | ", 1) for line in lines]
    rows = [(gloss.split('; "')[0].strip(), KINDS.get(int(head.split()[1]), "")) for head, gloss in cut]
    return [row for row in rows if row[1] and len(row[0].split()) > 3]


def manual() -> Rows:
    """What a page is about, and its section."""
    listed = subprocess.run(["man", "-k", "."], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\S+ \((\d)\w*\)\s+- (.*)$", listed, re.MULTILINE)
    return list(dict.fromkeys((text, section) for section, text in found if len(text.split()) > 3))


def rated(sdist: Path) -> Iterator[tuple[str, Rows]]:
    """Sentences with the sign of their mean rating."""
    with tarfile.open(sdist) as outer:
        packed = outer.extractfile(ARCHIVE)
        assert packed is not None
        with tarfile.open(fileobj=io.BytesIO(packed.read())) as inner:
            for task, name in RATED.items():
                file = inner.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
                assert file is not None
                cells = [line.split("\t") for line in file.read().decode("utf-8", "replace").splitlines()]
                yield (
                    task,
                    [
                        (row[2].strip(), "above" if float(row[1]) > 0 else "below")
                        for row in cells
                        if len(row) > 2 and len(row[2].split()) > 3
                    ],
                )


def main() -> None:
    """Writes every task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sdist", type=Path)
    args = parser.parse_args()
    for name, rows in [("glosses", glosses()), ("manual", manual()), *rated(args.sdist)]:
        write_task(args.folder, name, ("text", "label"), rows)


if __name__ == "__main__":
    main()
