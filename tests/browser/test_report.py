"""The report in Chromium has no errors and no requests, executes no text of the data, and shows values."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from boxes import LOOKS, page_faults, unfold_all
from devtools import Browser

from tunesmith.report.build import build_report, render_comparison, render_report
from tunesmith.report.compare import compare_runs

pytestmark = pytest.mark.slow
TITLE = "mrpc-bert-base · tunesmith report"


def requests_of(browser: Browser, page: Path) -> list[str]:
    """Return the page's requests, except for itself and inline data."""
    return browser.outside(page.as_uri())


def page_of(synthetic: SimpleNamespace, tmp_path: Path, *, hostile: bool = False) -> Path:
    events = synthetic.make_run(
        [0.5, 0.3, 0.15, 0.06], [0.45, 0.40, 0.46, 0.63], accuracy=[0.78, 0.85, 0.86, 0.85], train_rows=3668
    )
    synthetic.make_folder(tmp_path, events, hostile=hostile)
    page = tmp_path / "report.html"
    page.write_text(render_report(build_report(tmp_path)), encoding="utf-8")
    return page


def test_report_opens_without_console_messages_or_requests(
    browser: Browser, synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    page = page_of(synthetic, tmp_path)
    browser.open_fresh(page.as_uri())
    assert browser.run("document.title") == TITLE
    assert browser.console == []
    assert requests_of(browser, page) == []


def test_hostile_text_labels_and_names_are_not_executed(
    browser: Browser, synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    page = page_of(synthetic, tmp_path, hostile=True)
    browser.open_fresh(page.as_uri())
    assert browser.run("document.title").endswith("tunesmith report")
    assert browser.console == []
    assert requests_of(browser, page) == []
    dom = browser.run("document.documentElement.outerHTML")
    assert "{{7*7}}" in dom
    assert "<img src=" not in re.sub(r'<img src="data:image/svg\+xml;base64,', "", dom)


def test_canaries_are_detected_if_executed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "canary.html"
    page.write_text(
        "<title>x</title><img src='http://127.0.0.1:9/x.png'><script>document.title='owned';console.error('oh')</script>"
    )
    browser.open_fresh(page.as_uri())
    assert browser.run("document.title") == "owned"
    assert any('"oh"' in line for line in browser.console)
    assert requests_of(browser, page) == ["http://127.0.0.1:9/x.png"]


def test_injected_script_is_blocked_by_content_policy(
    browser: Browser, synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    page = page_of(synthetic, tmp_path)
    evil = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", evil + "</main>"), encoding="utf-8")
    browser.open_fresh(page.as_uri())
    assert browser.run("document.title") == TITLE
    assert any("Content Security Policy" in line for line in browser.console)


def test_pointer_and_arrow_keys_show_logged_values(
    browser: Browser, synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    script = """(() => {
      const figure = document.querySelector('figure[data-chart="metric"]'), words = figure.querySelector('figcaption');
      const press = (key) => figure.dispatchEvent(new KeyboardEvent('keydown', {key: key, cancelable: true}));
      const shown = [];
      press('ArrowRight'); shown.push(words.textContent);
      press('ArrowRight'); shown.push(words.textContent);
      press('End'); shown.push(words.textContent);
      const loss = document.querySelector('figure[data-chart="loss"]'), frame = loss.querySelector('.picture');
      const box = frame.getBoundingClientRect();
      frame.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * 0.6, clientY: box.top + 50}));
      shown.push(loss.querySelector('figcaption').textContent, String(loss.querySelector('.hair').hidden));
      return shown;
    })()"""
    browser.open_fresh(page_of(synthetic, tmp_path).as_uri())
    values: Any = browser.run(script)
    assert browser.console == []
    first, second, last, loss, hidden = values
    assert first == "step 100training sample 0.7500validation 0.7800"
    assert second == "step 200training sample 0.8500validation 0.8500"
    assert last == "step 400training sample 0.9700validation 0.8500"
    assert re.match(r"step \d+training 0\.\d{4}smoothed 0\.\d{4}validation 0\.\d{4} \(step [234]00\)", loss)
    assert hidden == "false"


@pytest.fixture(scope="module")
def pages(synthetic: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write reports of a binary run, many classes, a regression and hostile names, and a comparison of two runs."""
    root = tmp_path_factory.mktemp("pages")
    events = synthetic.make_run([0.5, 0.3], [0.45, 0.40], accuracy=[0.78, 0.85])
    runs = {name: synthetic.make_split_folder(root / name, kind=name) for name in ("many", "values")}
    runs |= {"two": synthetic.make_folder(root / "two", events), "other": synthetic.make_folder(root / "other", events)}
    runs["hostile"] = synthetic.make_folder(root / "hostile", events, hostile=True)
    (runs["other"] / "run.yaml").write_text(
        "learning_rate: 1e-4\nmodel_name_or_path: /a/folder/of/models/bert-base-uncased\n"
    )
    made = {name: (run / "report.html", render_report(build_report(run))) for name, run in runs.items()}
    made["compare"] = (root / "compare.html", render_comparison(compare_runs([runs["two"], runs["other"]])))
    for file, text in made.values():
        file.write_text(text, encoding="utf-8")
    return {name: file for name, (file, _) in made.items()}


@pytest.mark.parametrize("name", ["two", "many", "values", "compare"])
def test_text_is_not_cut_off_or_covered_at_any_width_and_theme(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open_fresh(pages[name].as_uri())
    for width, dark in LOOKS:
        browser.look(width=width, height=900, dark=dark)
        assert page_faults(browser) == [], (width, dark)
    unfold_all(browser)
    for width in (390, 1400):
        browser.look(width=width, height=900)
        # A matrix of many labels and the table of all evaluations scroll inside their frames.
        assert page_faults(browser, may_scroll="table") == [], width
    assert browser.console == []


def test_report_with_hostile_names_fits_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open_fresh(pages["hostile"].as_uri())
    browser.look(width=360, height=800)
    assert browser.run("innerWidth") == 360
    assert browser.run("document.documentElement.scrollWidth") <= 360


def test_layout_check_finds_cut_covered_and_outside_text(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<p style='width:40px;overflow-wrap:anywhere'>interesting</p><p style='position:absolute;top:200px'>below</p>"
        "<p style='position:absolute;top:204px'>above</p><p style='white-space:nowrap'>"
        + "far " * 20
        + "</p><div aria-label='wide' style='overflow-x:auto;width:100px'><table><td>unbreakable_words_in_cells</table></div>"
    )
    browser.open_fresh(page.as_uri())
    browser.look(width=390, height=900)
    faults = " ".join(page_faults(browser))
    for words in ("cut word: interesting", "below lies on above", "outside: far", "sideways", "does not fit: wide"):
        assert words in faults, words


def test_report_of_many_classes_starts_with_the_worst(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open_fresh(pages["many"].as_uri())
    assert browser.run("document.querySelectorAll('.lead').length") == 1
    lead = browser.run("document.querySelector('.lead').innerText")
    assert "F1 macro" in lead
    assert "test, 300 rows" in lead
    assert "0.600" in lead
    heads = browser.run("[...document.querySelectorAll('.grid thead th')].map((e) => e.firstChild.data.trim())")
    assert heads == ["score", "test", "validation"]
    script = (
        "[...document.querySelectorAll('.labels tbody tr')].map((e) => [e.cells[1].innerText, e.cells[4].innerText])"
    )
    cells = browser.run(script)
    assert len(cells) == 14
    scores = [float(f1) for rows, f1 in cells if rows != "0"]
    assert scores == sorted(scores)
    rows = browser.run("[...document.querySelectorAll('.numbered .row')].map((e) => parseInt(e.textContent))")
    assert rows == sorted(rows, reverse=True)
    warnings = browser.run("[...document.querySelectorAll('.warnings strong')].map((e) => e.innerText)")
    assert warnings == ["Split leak", "Cut rows"], "errors first, without information messages"
    when = browser.run("document.querySelector('.when').innerText")
    assert "14 November 2023" in when
    assert "12 min 34 s" in when
    assert "2 cores" in when
