"""The diagnosis of each run in the list: a few runs are diagnosed at a time, and again only when they change."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

from tunesmith.errors import TunesmithError
from tunesmith.findings import Finding
from tunesmith.report.diagnosis import diagnose_run, tone_and_title
from tunesmith.runs.folder import RunDir

AGAIN_SECONDS = 15.0
"""A run in training writes every second; its verdict may be this old."""
BUSY_SHARE = 0.05
Verdict = tuple[str, str]
"""Kind (good, warn, bad, info) and title."""


def with_title(finding: Finding) -> dict[str, object]:
    """A finding as the page of a run shows it."""
    kind, title = tone_and_title(finding)
    unsure = finding.doubt or finding.code == "not_enough_evidence"
    shown = {"numbers": {}, "kind": kind, "title": title + finding.doubt}
    return finding.to_json() | shown | ({"confidence": None} if unsure else {})


@dataclass(frozen=True, slots=True)
class _Known:
    mark: Hashable
    verdict: Verdict | None
    not_before: float


class Verdicts:
    """The verdict of each run, kept until its files change."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def find(self, run_id: str, run: RunDir, mark: Hashable, *, until: float) -> Verdict | None:
        """The verdict, as far as it is known: a run is read only before `until`, a time of the monotonic clock."""
        known = self._known.get(run_id)
        now = time.monotonic()
        if now < until and (known is None or (known.mark != mark and now >= known.not_before)):
            verdict = _read(run)
            spent = time.monotonic() - now
            wait = max(AGAIN_SECONDS, spent / BUSY_SHARE) if run.lock_file.exists() else 0.0
            self._known[run_id] = known = _Known(mark, verdict, now + wait)
        return known.verdict if known is not None else None


def _read(run: RunDir) -> Verdict | None:
    try:
        found = diagnose_run(run)
    except (TunesmithError, OSError, ValueError):
        return None
    return tone_and_title(found[0]) if found else None
