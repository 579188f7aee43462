"""The tables of bench/diagnose_runs.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from diagnose_causes import CAUSES, MADE_WELL, name_run
from diagnose_judge import SIGMAS, Followed, Run

TITLES = {
    "choose": "tasks that rules were chosen on",
    "report": "tasks that nothing was chosen on",
    "last": "tasks that were new at the first evaluation",
    "fresh": "tasks that no run was looked at before",
    "outside": "tasks that are not of ../shared",
    "outside_choose": "further ones that rules may be chosen on",
    "outside_first": "further ones, looked at once",
    "outside_last": "the last ones, looked at once",
    "sealed": "tasks of further packages, looked at once after the model was fixed",
}
LOOK_FIRST = ("no_signal", "label_noise", "split_mismatch", "not_enough_evidence")
"""Verdicts whose first advice is a look at the data: no options that a program could follow."""

SAME = ("no_signal", "label_noise")
"""Hardly to be told apart where nothing was learnt; both are about the labels and have the same advice."""


def print_runs(runs: list[Run]) -> None:
    """One line a run."""
    for run in sorted(runs, key=lambda run: (list(CAUSES).index(run.key[2]), run.key)):
        mark = "ok" if run.verdict in run.right else "WRONG"
        print(f"{mark:5} {name_run(run.key):30} {run.harm:8} | {run.verdict}: {run.findings[0].evidence}", end="")
        print(f" | {run.findings[0].advice[0] if run.findings[0].advice else ''}")


def print_table(group: str, runs: list[Run], peers: dict[str, Any] | None = None) -> None:
    """Confusion matrix of cause and first verdict, and the figures that count."""
    if not runs:
        return
    verdicts = sorted({run.verdict for run in runs})
    tasks = sorted({run.key[1] for run in runs})
    print(f"\n## {TITLES[group]}: {len(runs)} runs, {len(tasks)} tasks ({', '.join(tasks)})\n")
    print("| made as | " + " | ".join(v.replace("_", " ") for v in verdicts) + " | right first | named |")
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
        f"right where no signal and label noise of a run at chance are one: {_share(_right(runs) + len(one), len(runs))}"
    )
    print(f"named among the likely ones: {_share(_named(runs), len(runs))}")
    print(f"warnings or errors on runs made healthy: {_share(sum(r.is_alarm for r in healthy), len(healthy))}", end="")
    print(f"; on those above chance without a rise on test rows: {_share(sum(r.is_alarm for r in able), len(able))}")
    chance = [r for r in runs if r.at_chance]
    print(f"runs at chance called healthy: {_share(sum(r.verdict == 'healthy' for r in chance), len(chance))}")
    for name in next(iter(peers["said"].values())) if peers else ():
        _print_peer(name, runs, peers or {})


def _title(run: Run) -> str:
    if run.key[2] in MADE_WELL:
        return run.key[2] + (f", {run.harm}" if run.harm else "")
    return run.key[2] + ("" if run.harm else ", no harm done")


def print_followed(group: str, followed: list[Followed]) -> None:
    """By verdict: whether the test score rose, and the loss fell, after the first advice was followed."""
    followed = [later for later in followed if later.place == 0 and later.verdict not in LOOK_FIRST]
    if not followed:
        return
    print(f"\n## the first advice followed, {TITLES[group]}: {len(followed)} runs\n")
    print("| verdict | runs | score higher | beyond 2 errors | lower beyond 2 errors | loss lower | median gain |")
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
    print(f"\nwarnings on runs made healthy whose advice raised the score beyond 2 errors: {_share(better, len(well))}")
    print(
        f"\nof these, the present code gives the same advice in {_share(sum(f.kept for f in followed), len(followed))}"
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
    print(f"{_share(alarms, len(well))} of runs made healthy")


def _print_peer(name: str, runs: list[Run], peers: dict[str, Any]) -> None:
    said = {name_run(run.key): peers["said"].get(name_run(run.key), {}).get(name) for run in runs}
    taken = [run for run in runs if (words := said[name_run(run.key)]) is not None and not words.startswith("refused")]
    codes = {key: tuple(peers["codes"].get(words, ())) if words else ("healthy",) for key, words in said.items()}
    if taken:
        _print_rates(f"{name} ({len(taken)} of {len(runs)} runs taken)", taken, lambda run: codes[name_run(run.key)])


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / whole:.0%})" if whole else "0/0"
