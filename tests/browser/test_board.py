"""The board in a real Chromium, over real processes: live curves, compare, restart, hostile text."""

from __future__ import annotations

import http.server
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from board_process import ENVIRONMENT, BoardProcess
from devtools import Browser
from tiny_training import make_model, make_table, train_command

from patience import patient
from tunesmith.inference.server import load_token
from tunesmith.runs.event_log import Journal

pytestmark = pytest.mark.slow


def training_command(*arguments: Any) -> list[str]:
    """`train_command`, started without waiting for imports."""
    return [sys.executable, *train_command(*arguments)[1:]]


@pytest.fixture
def board(tmp_path: Path) -> Iterator[BoardProcess]:
    (tmp_path / "runs").mkdir()
    made = BoardProcess(tmp_path / "runs", tmp_path / "state")
    yield made
    if made.process.poll() is None:
        assert made.stop() in (-signal.SIGTERM, 143)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("tiny")
    return SimpleNamespace(model=make_model(folder / "model"), table=make_table(folder / "reviews.csv"))


def quiet(browser: Browser, board: BoardProcess) -> None:
    """No message in the console, no request to anywhere else."""
    assert browser.console == []
    assert browser.outside(board.own) == []


def test_list_filters_and_compares_ticked_runs(
    browser: Browser, board: BoardProcess, tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    events = synthetic.make_run([0.5, 0.3, 0.15], [0.45, 0.40, 0.46], accuracy=[0.78, 0.85, 0.86], steps_per_epoch=30)
    for name in ("first", "second"):
        synthetic.make_folder(tmp_path / "runs" / name, events)
    browser.open_fresh(board.address)
    assert browser.run("location.search") == "", "the token stays in the address bar"
    browser.wait("document.querySelectorAll('#rows .run').length === 2")
    synthetic.make_folder(tmp_path / "runs" / "third", events)
    browser.wait("document.querySelectorAll('#rows .run').length === 3")  # by itself
    assert browser.run("document.getElementById('go').disabled") is True
    browser.run("document.querySelectorAll('#rows input').forEach((box, k) => { if (k < 2) box.click(); })")
    assert browser.run("document.getElementById('go').textContent") == "Compare 2"
    browser.run("document.getElementById('filter').value = 'nothing like this'")
    browser.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
    assert browser.run("document.getElementById('count').textContent") == "0 of 3 runs"
    browser.run("document.getElementById('go').click()")
    browser.wait("location.pathname === '/compare' && document.readyState === 'complete'")
    assert "no evidence of a difference" in browser.run("document.body.innerText")
    quiet(browser, board)


def test_page_updates_live_while_event_log_grows(
    browser: Browser, board: BoardProcess, tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    events = synthetic.make_run([0.5, 0.3, 0.15, 0.06], [0.45, 0.40, 0.46, 0.63], accuracy=[0.78, 0.85, 0.86, 0.83])
    folder = tmp_path / "runs" / "growing"
    journal = Journal(folder / "journal.jsonl")
    for event in events[:60]:
        journal.append(event)
    browser.open_fresh(board.address)
    browser.open(f"{board.own}/runs/growing")
    browser.wait("document.querySelector('.plot .raw') !== null")
    browser.run("window.untouched = true")
    before = browser.run("document.querySelector('.plot .raw').getAttribute('d').length")
    assert browser.run("document.getElementById('step').textContent") == "58 of 400"
    assert browser.run("document.getElementById('status').textContent") == "running"
    assert "Not enough evidence" in browser.run("document.getElementById('findings').innerText")
    for event in events[60:200]:
        journal.append(event)
    browser.wait("document.getElementById('step').textContent.startsWith('19')")
    assert browser.run("document.querySelector('.plot .raw').getAttribute('d').length") > before
    for event in events[200:]:
        journal.append(event)
    journal.close()
    browser.wait("document.getElementById('findings').innerText.includes('Overfitting')")
    browser.wait("document.getElementById('status').textContent === 'finished'")
    assert browser.run("window.untouched") is True, "the page was reloaded"
    last = next(e for e in reversed(events) if type(e).__name__ == "StepDone")
    assert browser.run("document.getElementById('loss').textContent") == f"{last.loss:.3f}"
    browser.run("document.querySelectorAll('.chart')[1].focus()")
    for key in ("ArrowRight", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    words = browser.run("document.querySelectorAll('.chart figcaption')[1].textContent")
    assert words == "step 200training sample 0.85validation 0.85"
    quiet(browser, board)


def test_chart_zooms_by_dragging_and_resets(
    browser: Browser, board: BoardProcess, tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    events = synthetic.make_run([0.5, 0.3], [0.45, 0.40], accuracy=[0.78, 0.85], steps_per_epoch=2000)
    synthetic.make_folder(tmp_path / "runs" / "long", events)
    browser.open_fresh(board.address)
    browser.open(f"{board.own}/runs/long")
    browser.wait("document.querySelector('.plot .raw') !== null")
    box = browser.run(
        "(() => { const b = document.querySelector('.plot').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    left, top, width, height = box
    y = top + height / 2

    def mouse(kind: str, share: float, buttons: int) -> None:
        options: dict[str, Any] = {"x": left + width * share, "y": y, "button": "left", "clickCount": 1}
        browser.call("Input.dispatchMouseEvent", type=kind, buttons=buttons, **options)

    mouse("mouseMoved", 0.4, 0)
    mouse("mousePressed", 0.4, 1)
    mouse("mouseMoved", 0.5, 1)
    mouse("mouseReleased", 0.5, 0)
    browser.wait("/^Steps/.test(document.getElementById('zoom').textContent)")
    browser.wait("document.querySelectorAll('.plot text').length > 5 && !document.getElementById('reset').hidden")
    browser.run("document.getElementById('reset').click()")
    assert browser.run("document.getElementById('zoom').textContent") == "Drag to zoom."
    quiet(browser, board)


def test_real_run_is_followed_until_it_stops(
    browser: Browser, board: BoardProcess, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    folder = tmp_path / "runs" / "real"
    command = training_command(tiny.model, tiny.table, folder, "--num_train_epochs", "4000", "--run_name", "reviews")
    training = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        browser.open_fresh(board.address)
        browser.wait("document.querySelector('[data-run=real] .running') !== null", seconds=90)
        browser.open(f"{board.own}/runs/real")
        browser.wait("document.querySelector('.plot .raw') !== null", seconds=60)
        first = browser.run("Number(document.getElementById('step').textContent.split(' ')[0].replaceAll(',', ''))")
        browser.wait(
            f"Number(document.getElementById('step').textContent.split(' ')[0].replaceAll(',', '')) > {first + 20}",
            seconds=60,
        )
        training.terminate()
        assert training.wait(timeout=patient(60)) == 143
        browser.wait("document.getElementById('status').textContent === 'stopped'", seconds=20)
    finally:
        training.kill()
        training.wait()
    browser.open(f"{board.own}/runs/real/report")
    assert browser.run("document.querySelector('h1').textContent") == "reviews"
    assert browser.run("document.querySelector('nav a').textContent") == "All runs"
    quiet(browser, board)


def test_hostile_names_data_and_config_are_not_executed(
    browser: Browser, board: BoardProcess, tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    events = synthetic.make_run([0.5, 0.3, 0.15], [0.45, 0.40, 0.46], accuracy=[0.7, 0.8, 0.8], steps_per_epoch=20)
    root = tmp_path / "runs"
    names = ("<img src=x onerror=document.title='owned'>", "'\"><svg onload=document.title='owned'>", "{{7*7}}")
    for name in names:
        synthetic.make_folder(root / name, events, hostile=True, rows=60)
    browser.open_fresh(board.address)
    browser.wait("document.querySelectorAll('#rows .run').length === 3")
    ids = browser.run("[...document.querySelectorAll('#rows .run')].map((row) => row.dataset.run)")
    pages = [
        "/",
        *(f"/runs/{one}" for one in ids),
        *(f"/runs/{one}/report" for one in ids),
        f"/compare?run={ids[0]}&run={ids[1]}",
    ]
    for page in pages:
        browser.open(board.own + page)
        time.sleep(0.3)
        assert browser.run("document.title") != "owned", page
        assert browser.run("document.querySelectorAll('img[src=x], svg[onload], [onerror]').length") == 0, page
        assert "49" not in browser.run("document.querySelector('h1').textContent")
    quiet(browser, board)


ATTACKS = """
const said = [];
const attempt = async (name, work) => {
  try { said.push(name + ": " + await work()); } catch (error) { said.push(name + ": blocked"); }
};
const include = {credentials: "include"};
await attempt("read", async () => (await fetch(target + "/", include)).status);
await attempt("blind read", async () => (await fetch(target + "/", {...include, mode: "no-cors"})).type);
await attempt("stream", () => new Promise((good, bad) => {
  const source = new EventSource(target + "/events", {withCredentials: true});
  source.onopen = () => good("open");
  source.onerror = bad;
}));
await attempt("script", () => new Promise((good, bad) => {
  const script = document.createElement("script");
  script.src = target + "/assets/list.js";
  script.onload = () => good("ran");
  script.onerror = bad;
  document.body.append(script);
}));
await attempt("frame", async () => { await new Promise((done) => setTimeout(done, 500)); return frames[0].document.title; });
document.title = said.join(", ");
"""


class EvilPage(http.server.BaseHTTPRequestHandler):
    """A different site on this machine that tries to read and frame the board with the visitor's cookies."""

    target = ""

    def do_GET(self) -> None:
        page = f'<title>waiting</title><iframe src="{self.target}/"></iframe><script type="module">'
        page += f'const target = "{self.target}";{ATTACKS}</script>'
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *words: object) -> None:
        pass


def test_page_on_another_port_can_neither_read_nor_frame(
    browser: Browser, board: BoardProcess, tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    synthetic.make_folder(tmp_path / "runs" / "alpha", synthetic.make_run([0.5], [0.5], steps_per_epoch=5), rows=12)
    browser.open_fresh(board.address)
    EvilPage.target = board.own
    evil = http.server.ThreadingHTTPServer(("127.0.0.1", 0), EvilPage)
    threading.Thread(target=evil.serve_forever, daemon=True).start()
    try:
        browser.open(f"http://127.0.0.1:{evil.server_address[1]}/")
        browser.wait("document.title.includes('frame')")
        said = browser.run("document.title")
        found = dict(part.split(": ") for part in said.split(", "))
        assert {k: v for k, v in found.items() if v not in ("blocked",)} == {}, said
    finally:
        evil.shutdown()
        evil.server_close()
    browser.open(f"{board.own}/runs/alpha")
    assert browser.run("document.querySelector('h1').textContent") == "mrpc-bert-base"


def test_open_page_survives_board_restart(
    browser: Browser, board: BoardProcess, tmp_path: Path, synthetic: SimpleNamespace
) -> None:
    synthetic.make_folder(tmp_path / "runs" / "alpha", synthetic.make_run([0.5], [0.5], steps_per_epoch=5), rows=12)
    browser.open_fresh(board.address)
    browser.wait("document.getElementById('live').textContent === 'live'")
    began = time.monotonic()
    assert board.stop() in (-signal.SIGTERM, 143)
    assert time.monotonic() - began < patient(10), "shutdown waited for an open page"
    browser.wait("document.getElementById('live').textContent === 'disconnected'")
    again = BoardProcess(tmp_path / "runs", tmp_path / "state", port=board.port)
    try:
        browser.wait("document.getElementById('live').textContent === 'live'", seconds=20)
        synthetic.make_folder(tmp_path / "runs" / "beta", synthetic.make_run([0.5], [0.5], steps_per_epoch=5), rows=12)
        browser.wait("document.querySelectorAll('#rows .run').length === 2")
    finally:
        assert again.stop() in (-signal.SIGTERM, 143)
    assert load_token(tmp_path / "state" / "tunesmith" / "board-token") in board.address
