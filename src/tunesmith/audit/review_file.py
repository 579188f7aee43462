"""The review file: suspicious labels as a csv that a person corrects and `train --labels_file` takes back."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from tunesmith.audit.suspects import Suspect
from tunesmith.audit.text_survey import Ints
from tunesmith.findings import Finding, Severity
from tunesmith.labels import LabelMap, Task

WARN_SHARE = 0.08
"""Share of suspicious rows from which they are worth a warning."""


def describe_suspects(
    suspects: Sequence[Suspect], rows: Ints, ids: Ints, labels: LabelMap, of: int, method: str, where: str | None
) -> list[Finding]:
    """One finding about all of them. `rows`: the row numbers of the judged rows, `of`: all rows of the split."""
    if not suspects:
        return []
    share = len(suspects) / len(rows)
    sampled = "" if len(rows) == of else f" (an even sample of {of:,})"
    first = suspects[0]
    kind = f"{_name(ids[first.row], labels)} instead of {_name(first.suggested, labels)}"
    evidence = (
        f"{len(suspects):,} of {len(rows):,} train rows{sampled} have a label that a model fitted without them contradicts "
        f"({method}); "
        f"the strongest: row {int(rows[first.row]) + 1:,}, {kind}."
    )
    step = f"Read them in {where}, correct the column label, and train with --labels_file {where}."
    advice = (step if where else "Write them out with `tunesmith audit --review_file review.csv` and read them.",)
    severity: Severity = "warning" if share >= WARN_SHARE else "info"
    numbers = {"rows": len(suspects), "judged": len(rows), "share": share, "method": method}
    return [Finding("suspicious_labels", severity, evidence, advice, numbers=numbers)]


def format_review(
    suspects: Sequence[Suspect],
    rows: Ints,
    texts: Sequence[Sequence[str]],
    ids: Ints,
    labels: LabelMap,
    columns: Sequence[str],
) -> bytes:
    """row (from 1), the texts, label, suggested_label, why; the most doubtful first."""
    out = io.StringIO(newline="")
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["row", *columns, "label", "suggested_label", "why"])
    for one in suspects:
        given, other = _name(ids[one.row], labels), _name(one.suggested, labels)
        table.writerow([int(rows[one.row]) + 1, *texts[one.row], given, other, _why(one, given, other, labels)])
    return out.getvalue().encode("utf-8", "backslashreplace")


def _why(one: Suspect, given: str, other: str, labels: LabelMap) -> str:
    if labels.task is Task.REGRESSION:
        return f"a model fitted without this row expects {other}, {-one.given:.1f} times the usual distance away"
    return f"a model fitted without this row gives {other} {one.other:.0%} and {given} {one.given:.0%}"


def _name(value: float, labels: LabelMap) -> str:
    return f"{float(value):.4g}" if labels.task is Task.REGRESSION else labels.names[int(value)]
