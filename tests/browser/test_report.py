"""The report in a real Chromium: nothing fails, nothing is fetched, no text of the data runs, values can be read off."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunesmith.report.build import build_report
from tunesmith.report.render import render_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install -y chromium)"),
]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
]


@dataclass(frozen=True)
class Visit:
    """What a browser saw."""

    dom: str
    console: list[str]
    requests: set[str]

    @property
    def title(self) -> str:
        found = re.search(r"<title>(.*?)</title>", self.dom, re.DOTALL)
        return html.unescape(found.group(1)) if found else ""


def visit(page: Path, tmp_path: Path, *flags: str) -> Visit:
    log = tmp_path / "net.json"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", *flags]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    urls = set(re.findall(r'"url":"([a-z]+://[^"]+)"', log.read_text(encoding="utf-8", errors="replace")))
    # The browser itself asks Google for the time and for accounts; a page's own requests go elsewhere.
    outside = {u for u in urls if not re.match(r"https?://[a-z0-9]+\.google\.com/", u) and not u.startswith("file:")}
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line], outside)


@pytest.fixture(scope="module")
def synthetic() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "synthetic_runs.py")))


def page_of(synthetic: SimpleNamespace, tmp_path: Path, *, hostile: bool = False) -> Path:
    events = synthetic.make_run(
        [0.5, 0.3, 0.15, 0.06], [0.45, 0.40, 0.46, 0.63], accuracy=[0.78, 0.85, 0.86, 0.85], train_rows=3668
    )
    synthetic.make_folder(tmp_path, events, hostile=hostile)
    page = tmp_path / "report.html"
    page.write_text(render_report(build_report(tmp_path)), encoding="utf-8")
    return page


def with_script(page: Path, script: str) -> Path:
    """A copy of the page whose policy also allows one script of the test's."""
    text = page.read_text(encoding="utf-8")
    mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert text.count("; script-src ") == 1
    text = text.replace("; script-src ", f"; script-src &#39;sha256-{mark}&#39; ")
    copy = page.with_name("scripted.html")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


def test_the_report_opens_without_console_message_and_without_any_request(
    synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    seen = visit(page_of(synthetic, tmp_path), tmp_path)
    assert seen.title == "mrpc-bert-base · tunesmith report"
    assert seen.console == []
    assert seen.requests == set()


def test_hostile_text_labels_columns_and_names_never_run(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    seen = visit(page_of(synthetic, tmp_path, hostile=True), tmp_path)
    assert seen.title.endswith("tunesmith report")
    assert seen.console == []
    assert seen.requests == set()
    assert "{{7*7}}" in seen.dom
    assert "<img src=" not in re.sub(r'<img src="data:image/svg\+xml;base64,', "", seen.dom)


def test_the_canaries_would_have_been_seen(tmp_path: Path) -> None:
    page = tmp_path / "canary.html"
    page.write_text(
        "<title>x</title><img src='http://127.0.0.1:9/x.png'><script>document.title='owned';console.error('oh')</script>"
    )
    seen = visit(page, tmp_path)
    assert seen.title == "owned"
    assert len(seen.console) == 1
    assert seen.requests == {"http://127.0.0.1:9/x.png"}


def test_a_script_that_slipped_into_the_page_is_stopped_by_its_policy(
    synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    page = page_of(synthetic, tmp_path)
    evil = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", evil + "</main>"), encoding="utf-8")
    seen = visit(page, tmp_path)
    assert seen.title == "mrpc-bert-base · tunesmith report"
    assert any("Content Security Policy" in line for line in seen.console)


def test_pointer_and_arrow_keys_read_the_journals_values(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    script = """
      const figure = document.querySelector('figure[data-chart="metric"]'), words = figure.querySelector('figcaption');
      const press = (key) => figure.dispatchEvent(new KeyboardEvent('keydown', {key: key, cancelable: true}));
      const said = [];
      press('ArrowRight'); said.push(words.textContent);
      press('ArrowRight'); said.push(words.textContent);
      press('End'); said.push(words.textContent);
      const loss = document.querySelector('figure[data-chart="loss"]'), frame = loss.querySelector('.picture');
      const box = frame.getBoundingClientRect();
      frame.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * 0.6, clientY: box.top + 50}));
      said.push(loss.querySelector('figcaption').textContent, String(loss.querySelector('.hair').hidden));
      document.title = JSON.stringify(said);
    """
    seen = visit(with_script(page_of(synthetic, tmp_path), script), tmp_path)
    assert seen.console == []
    first, second, last, loss, hidden = json.loads(seen.title)
    assert first == "step 100training sample 0.7500validation 0.7800"
    assert second == "step 200training sample 0.8500validation 0.8500"
    assert last == "step 400training sample 0.9700validation 0.8500"
    assert re.match(r"step \d+training 0\.\d{4}smoothed 0\.\d{4}validation 0\.\d{4} \(step [234]00\)", loss)
    assert hidden == "false"


def test_nothing_is_wider_than_a_phone(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    script = "document.title = JSON.stringify([document.documentElement.scrollWidth, window.innerWidth]);"
    page = with_script(page_of(synthetic, tmp_path, hostile=True), script)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="{page.name}" width="360" height="800"></iframe>'
        "<script>onload=()=>{document.title=frames[0].document.title}</script>"
    )
    seen = visit(frame, tmp_path, "--allow-file-access-from-files")
    needed, there = json.loads(seen.title)
    assert there == 360
    assert needed <= 360
