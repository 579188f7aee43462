"""Makes the bank of bench/diagnose_runs.py: many processes, a balanced order, and a run that follows the first advice beside."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diagnose_causes import Key, name_run
from diagnose_tasks import TASKS
from diagnose_train import make_run
from tunesmith.diagnosis.advice import advised_options
from tunesmith.findings import Finding
from tunesmith.pipeline.recipe import NAMES


def advice_of(findings: list[Finding]) -> dict[str, str | None]:
    """The options that the printed command of a verdict would change: of the first advice that is made of options."""
    return next((found for advice in findings[0].advice if (found := advised_options(advice))), {})


def judge_run(run: Mapping[str, Any]) -> list[Finding]:
    """The findings of the present code about a run of the bank."""
    from tunesmith.report.build import diagnose_with
    from tunesmith.runs.curves import build_curves
    from tunesmith.runs.event_log import columns_of, parse_events

    events = list(parse_events(run["journal"].encode(), name_run(tuple(run["key"]))))
    return diagnose_with(build_curves(columns_of(events), name=run["key"][1]), run["options"], run["summary"])


OTHER = {"recipe": "auto", **dict.fromkeys((*NAMES, "load_best_model_at_end", "freeze", "gradient_accumulation_steps"))}
"""What else may mend a run: all options by the recipe."""
TRIED = {
    "overfitting": ({"load_best_model_at_end": "true"}, OTHER),
    "calibration_drift": ({"load_best_model_at_end": "true"}, OTHER),
    "class_ignored": (OTHER,),
    "erratic": (OTHER,),
    "underfitting": (OTHER,),
    "stopped_too_early": (OTHER,),
}
"""Other changes that are tried to choose the advice."""


def list_changes(run: Mapping[str, Any], findings: list[Finding]) -> list[dict[str, str | None]]:
    """The first advice of a run that is not healthy; on tasks that rules are chosen on, what else could be advised."""
    first = advised_options(findings[0].advice[0]) if findings[0].advice else {}
    if findings[0].code in ("healthy", "not_enough_evidence") or not first:
        return []
    if TASKS[run["key"][1]].group not in ("choose", "report", "last"):
        return [first]
    some = findings[0].code in ("overfitting", "calibration_drift", "class_ignored", "erratic")
    rest = [advised_options(advice) for advice in findings[0].advice[1:3] if some]
    return [first, *(found for found in (*rest, *TRIED.get(findings[0].code, ())) if found not in ({}, first))]


def follow_run(run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same rows with the options that the verdict advises; none for a good run, or an advice that is not options."""
    findings = judge_run(run)
    for place, changes in enumerate(list_changes(run, findings)):
        options = {name: value for name, value in run["options"].items() if changes.get(name, "") is not None}
        options |= {name: value for name, value in changes.items() if value is not None}
        made = make_run(tuple(run["key"]), options)
        test = [line for line in made["journal"].splitlines() if '"RowsEvaluated"' in line and '"test"' in line][-1]
        what = {"verdict": findings[0].code, "changes": changes, "place": place, "test": test}
        yield {"key": run["key"], **what, "seconds": made["seconds"]}


def _work(number: int, todo: list[Key], following: Any, until: float, output: Path, follow: float) -> None:
    """One process: takes the next run until there is none or the time is up."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    file = output / f"bank-{number}.jsonl.gz"
    with gzip.open(file, "at", compresslevel=6) as out:
        while time.time() < until:
            with following.get_lock():
                at = following.value
                following.value += 1
            if at >= len(todo):
                return
            try:
                run = make_run(todo[at])
                out.write(json.dumps(run) + "\n")
                chosen = zlib.crc32(name_run(todo[at]).encode()) % 100 < 100 * follow
                for followed in follow_run(run) if chosen and time.time() < until else ():
                    out.write(json.dumps(followed) + "\n")
                out.flush()
            except Exception:  # one run less; the others are made
                print(name_run(todo[at]), traceback.format_exc()[-1500:], flush=True)


def make_bank(output: Path, keys: list[Key], *, seconds: float, processes: int, follow: float = 0.0) -> None:
    """Makes those of these runs that are not in `output` until the time is up; each process writes one file there.

    `follow`: the share of runs whose first advice is followed in a second run.
    """
    output.mkdir(parents=True, exist_ok=True)
    done = {tuple(run["key"]) for run in read_bank(output)}
    wanted = [key for key in keys if key not in done]
    context = multiprocessing.get_context("spawn")
    following, until, first = context.Value("i", 0), time.time() + seconds, len(list(output.glob("bank-*.gz")))
    rest = (wanted, following, until, output, follow)
    if processes == 1:
        return _work(first, *rest)
    workers = [context.Process(target=_work, args=(first + k, *rest)) for k in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    made = list(read_bank(output))
    runs = sum("journal" in run for run in made) - len(done)
    print(f"{runs} of {len(wanted)} runs made in {seconds + time.time() - until:.0f} s", end=", ", flush=True)
    print(f"{sum('changes' in run for run in made)} runs in all that follow an advice", flush=True)
    return None


def merge_bank(output: Path, files: int) -> None:
    """The files of all processes as at most so many: gzip members stand one behind the other."""
    found = sorted(output.glob("bank-*.gz"))
    for number in range(min(files, len(found))):
        data = b"".join(path.read_bytes() for path in found[number::files])
        (output / f"merged-{number}.jsonl.gz").write_bytes(data)
    for path in found:
        path.unlink()
    for path in sorted(output.glob("merged-*.gz")):
        path.rename(path.with_name(path.name.replace("merged", "bank")))


def read_bank(output: Path) -> Any:
    """Every run in these files; a last line that was cut is left out."""
    for path in sorted(output.glob("bank-*.gz")):
        try:
            with gzip.open(path, "rt") as file:
                for line in file:
                    if line.endswith("\n"):
                        yield json.loads(line)
        except (EOFError, gzip.BadGzipFile, json.JSONDecodeError):
            continue
