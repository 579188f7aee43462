"""Pages of the board, made from templates with autoescape; the report and the comparison as their own rooms make them."""

from __future__ import annotations

import html
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tunesmith.files import read_json
from tunesmith.inference.kept_models import model_home
from tunesmith.inference.model_folder import FACTS_FILE
from tunesmith.inference.runs import RunRow, spark_points
from tunesmith.runs.folder import RunDir

ASSETS = {
    "page.css": "text/css; charset=utf-8",
    "board.css": "text/css; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "list.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
}
"""Everything the board serves besides pages: these names and no others."""
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_SEPARATOR = re.compile(r"(?<=[_./\\:=])")
_BODY = "<body>\n"


@cache
def read_asset(name: str) -> bytes:
    """One of ASSETS. The look is the report's own style sheet; the board adds what a report does not have."""
    folder = files("tunesmith.report") if name == "page.css" else files("tunesmith.serve") / "assets"
    return (folder / name).read_bytes()


def list_page(rows: Sequence[RunRow], root: str) -> str:
    """The list of runs; complete without a script."""
    return str(_template("list.html.j2").render(rows=rows, root=root, now=time.time()))


def run_page(row: RunRow, run: RunDir, facts: dict[str, Any] | None) -> str:
    """The page of one run; its curves arrive later as events."""
    return str(_template("run.html.j2").render(row=row, run=run, facts=facts))


def model_facts(run: RunDir) -> dict[str, Any] | None:
    """Text columns and labels of the finished model, without loading it; None when there is none."""
    try:
        data = read_json(model_home(run) / FACTS_FILE)
        columns = data["text_columns"] or ["text"]
        return {"columns": [str(c) for c in columns][:2], "labels": [str(n) for n in data["labels"]["names"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


class PageCache:
    """Reports take a second to draw: kept until one of the run's files changes."""

    def __init__(self, size: int = 12) -> None:
        self._size = size
        self._kept: OrderedDict[Hashable, str] = OrderedDict()
        self._lock = threading.Lock()

    def report(self, run: RunDir, run_id: str) -> str:
        """The report of a run, with a way back to the board."""
        from tunesmith.report.build import build_report
        from tunesmith.report.render import render_report

        back = [("All runs", "/"), ("Live curves and try-it", f"/runs/{run_id}")]
        return self._get(("report", *_marks(run)), lambda: _with_links(render_report(build_report(run)), back))

    def comparison(self, runs: Sequence[RunDir]) -> str:
        """Several runs side by side."""
        from tunesmith.report.compare import compare_runs
        from tunesmith.report.render import render_comparison

        marks = tuple(_marks(run) for run in runs)
        return self._get(
            ("compare", *marks),
            lambda: _with_links(render_comparison(compare_runs([run.path for run in runs])), [("All runs", "/")]),
        )

    def _get(self, key: Hashable, make: Callable[[], str]) -> str:
        with self._lock:  # matplotlib draws one picture at a time anyway
            if key not in self._kept:
                self._kept[key] = make()
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]


def policy_of(page: str) -> str:
    """The policy a page of the report room declares, as a header: one script and one style sheet, by hash."""
    found = _POLICY.search(page)
    assert found is not None
    return html.unescape(found.group(1)) + "; frame-ancestors 'none'"


def _with_links(page: str, links: Sequence[tuple[str, str]]) -> str:
    made = "".join(f'<a href="{html.escape(address)}">{html.escape(text)}</a>' for text, address in links)
    return page.replace(_BODY, f'{_BODY}<div class="top"><nav aria-label="Board">{made}</nav></div>\n', 1)


def _marks(run: RunDir) -> tuple[Any, ...]:
    watched = (run.journal_file, run.config_file, run.metrics_file, run.predictions_file, run.data_summary_file)
    found = []
    for file in watched:
        try:
            info = os.lstat(file)
            found.append((info.st_ino, info.st_size, info.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return (str(run.path), *found)


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ago": _ago, "spark": spark_points, "short": lambda v: f"{v:.3f}", "breakable": _breakable}
    text = (files("tunesmith.serve") / "assets" / name).read_text(encoding="utf-8")
    return environment.from_string(text)


def _ago(seconds: float) -> str:
    for limit, unit, name in ((90, 1, "second"), (5400, 60, "minute"), (129_600, 3600, "hour")):
        if seconds < limit:
            count = max(0, round(seconds / unit))
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return f"{round(seconds / 86_400)} days ago"


def _breakable(text: object) -> Any:
    """A name that may be wrapped behind a separator; browsers do so only behind hyphens."""
    from markupsafe import Markup

    return Markup("<wbr>").join(_SEPARATOR.split(str(text)))
