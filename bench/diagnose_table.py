"""The tables of bench/diagnose_runs.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from diagnose_causes import CAUSES, Key, name_run
from diagnose_judge import Run, Truth, find_truth

Judged = dict[Key, tuple[Run, Truth]]


def print_runs(runs: Mapping[Key, Run]) -> None:
    """One line a run."""
    for key, run in sorted(runs.items(), key=lambda item: (list(CAUSES).index(item[0][2]), item[0])):
        truth = find_truth(run, runs)
        mark = "-" if truth is None else "ok" if run.verdict in truth.right else "WRONG"
        why = truth.why if truth else ""
        print(
            f"{mark:5} {name_run(key):28} test {run.accuracy:.3f} ({run.majority:.2f}) {run.loss:.3f} {why:16} | ",
            end="",
        )
        print(f"{run.verdict}: {run.findings[0].evidence} | {run.findings[0].advice[0]}")


def print_table(
    title: str,
    part: Mapping[Key, Run],
    runs: Mapping[Key, Run],
    followed: Mapping[Key, Run | None],
    peers: dict[str, Any] | None,
) -> None:
    """Confusion matrix of truth and verdict, and the three figures that count."""
    judged: Judged = {key: (run, truth) for key, run in part.items() if (truth := find_truth(run, runs)) is not None}
    if not judged:
        return
    verdicts = sorted({run.verdict for run, _ in judged.values()})
    print(f"\n## {title}: {len(judged)} runs judged, {len(part) - len(judged)} beside them for comparison\n")
    print("| made as | test score says | " + " | ".join(v.replace("_", " ") for v in verdicts) + " | right |")
    print("|---|---|" + "---|" * (len(verdicts) + 1))
    for cause in CAUSES:
        for healthy in (True, False):
            row = [(r, t) for r, t in judged.values() if r.key[2] == cause and t.healthy is healthy]
            if row:
                counts = Counter(r.verdict for r, _ in row)
                told = " | ".join(str(counts[v] or "") for v in verdicts)
                good = sum(r.verdict in t.right for r, t in row)
                print(f"| {cause} | {'healthy' if healthy else 'harmed'} | {told} | {good}/{len(row)} |")
    _print_rates("tunesmith", judged, lambda run: (run.verdict,))
    _print_advice(judged, followed)
    for name in next(iter(peers["said"].values())) if peers else ():
        _print_peer(name, judged, peers or {})


def _print_rates(name: str, judged: Judged, verdicts: Callable[[Run], tuple[str, ...]]) -> None:
    right = sum(any(v in t.right for v in verdicts(r)) for r, t in judged.values())
    well = [r for r, t in judged.values() if t.healthy]
    made_well = [r for r in well if r.key[2].startswith("healthy")]
    alarms = [sum("healthy" not in verdicts(r) for r in group) for group in (well, made_well)]
    ill = [(r, t) for r, t in judged.values() if not t.healthy]
    named = sum(any(v in t.right for v in verdicts(r)) for r, t in ill)
    print(
        f"\n{name}: right {_share(right, len(judged))}; false alarms {_share(alarms[0], len(well))} of healthy runs",
        end="",
    )
    print(
        f" ({_share(alarms[1], len(made_well))} of those made healthy); unhealthy ones named {_share(named, len(ill))}"
    )


def _print_advice(judged: Judged, followed: Mapping[Key, Run | None]) -> None:
    """Whether the first advice raised the test score."""
    ill = {key: pair for key, pair in judged.items() if not pair[1].healthy}
    missed = [key for key, (run, _) in ill.items() if run.verdict == "healthy"]
    people = [key for key in ill if key in followed and followed[key] is None]
    tried = {key: other for key in ill if (other := followed.get(key)) is not None and key not in missed}
    helped = [key for key, other in tried.items() if ill[key][1].is_cured(ill[key][0], other)]
    rose = [key for key, other in tried.items() if other.accuracy > ill[key][0].accuracy]
    print(f"first advice followed in {len(tried)} of {len(ill)} unhealthy runs: the test score improved in ", end="")
    print(f"{_share(len(helped), len(tried))} (accuracy rose in {_share(len(rose), len(tried))}); ", end="")
    print(f"advice only a person can follow: {len(people)}; called healthy, nothing to follow: {len(missed)}")
    print(f"counting these two as not improved: {_share(len(helped), len(tried) + len(people) + len(missed))}")
    counts, good = Counter(k[2] for k in tried), Counter(k[2] for k in helped)
    print("by cause: " + ", ".join(f"{cause} {good[cause]}/{n}" for cause, n in counts.items()))


def _print_peer(name: str, judged: Judged, peers: dict[str, Any]) -> None:
    said = {key: peers["said"][name_run(key)][name] for key in judged if name_run(key) in peers["said"]}
    refused = [key for key, words in said.items() if words.startswith("refused")]
    taken = {key: judged[key] for key in said if key not in refused}
    codes = {
        key: tuple(peers["codes"][words]) if words else ("healthy",) for key, words in said.items() if key in taken
    }
    if refused:
        print(f"\n{name} refused {len(refused)} of {len(said)} runs ({said[refused[0]]})", end="")
    if taken:
        _print_rates(name, taken, lambda run: codes[run.key])
    print(f"  it said: {dict(Counter(w.split(':')[0] or 'nothing' for w in said.values()))}")


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / whole:.0%})" if whole else "0/0"
