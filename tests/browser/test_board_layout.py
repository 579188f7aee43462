"""The board's pages as a person sees them, by the boxes Chromium makes: at 390 and 1400 pixels, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from board_process import BoardProcess
from devtools import Browser

from sampling import crossed

pytestmark = pytest.mark.slow
BOXES = (Path(__file__).parent / "boxes.js").read_text(encoding="utf-8")
LONG = "reviews_of_the_last_quarter.cleaned_twice.all-MiniLM-L6-v2.lr2e-5.seed42_final_final"
SHOWN = "[...document.querySelectorAll('#rows .run')].filter((row) => !row.hidden).map((row) => row.dataset.run)"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory, synthetic: SimpleNamespace) -> Iterator[SimpleNamespace]:
    home = tmp_path_factory.mktemp("project")
    names = synthetic.make_gallery(home / "runs")
    process = BoardProcess(home / "runs", home / "state")
    yield SimpleNamespace(address=process.address, own=process.own, names=names)
    process.stop()


@pytest.fixture
def listed(browser: Browser, board: SimpleNamespace) -> Browser:
    """Return the browser on the list page, after all verdicts are shown."""
    browser.open_fresh(board.address)
    browser.wait("[...document.querySelectorAll('.tone')].filter((cell) => cell.textContent).length >= 9")
    browser.wait("document.querySelector('#rows .run').run !== undefined")  # the first push
    return browser


def ids(browser: Browser) -> dict[str, str]:
    """Name of a run -> its id."""
    found = browser.run(
        "[...document.querySelectorAll('#rows .run')].map((r) => [r.querySelector('.name').textContent, r.dataset.run])"
    )
    return dict(found)


def test_layout_check_finds_planted_faults(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "faults.html"
    page.write_text(
        "<!doctype html><div style='width:900px'>wide</div><p style='width:40px;overflow-wrap:anywhere'>breakfast</p>"
        "<p style='width:30px;overflow:hidden;white-space:nowrap'>hidden words</p>"
        "<p style='position:absolute;top:200px'>under</p><p style='position:absolute;top:204px'>over</p>"
    )
    browser.open_fresh(page.as_uri())
    browser.look(width=390)
    wrong = browser.run(BOXES)
    for part in ("scrolls sideways", "broken word: breakfast", "cut: P", "under covers over"):
        assert any(part in line for line in wrong), part


@pytest.mark.parametrize(("width", "dark"), crossed([390, 1400], [True, False]))
def test_text_is_not_cut_off_or_covered_on_any_page(
    listed: Browser, board: SimpleNamespace, width: int, dark: bool
) -> None:
    found = ids(listed)
    runs = ["/runs/" + found.get(name, name) for name in ("diverged", LONG, "running", "damaged", "regression")]
    pages = ["/", *runs]
    listed.look(width=width, height=900, dark=dark)
    for page in pages:
        listed.open(board.own + page)
        listed.wait("!document.getElementById('live') || document.getElementById('live').textContent === 'live'")
        if page.startswith("/runs") and "damaged" not in page:
            listed.wait("document.querySelectorAll('.plot').length >= 1 && !document.querySelector('#findings .none')")
            listed.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        listed.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        assert listed.run(BOXES) == [], page
    # The tables of the comparison scroll inside their frame on a phone; the page itself does not.
    listed.open(f"{board.own}/compare?run=healthy&run={found[LONG]}&run=diverged")
    wrong = listed.run(BOXES)
    assert wrong == [] if width > 1000 else not any("sideways" in line or "covers" in line for line in wrong)
    assert listed.console == []


def test_list_shows_verdicts_and_only_good_ones_green(listed: Browser) -> None:
    told = dict(
        listed.run(
            "[...document.querySelectorAll('#rows .run')].map((row) => [row.querySelector('.name').textContent,"
            " [row.querySelector('.tone').textContent, row.querySelector('.tone').className,"
            " getComputedStyle(row.querySelector('.pill')).color]])"
        )
    )
    green = listed.run("getComputedStyle(document.querySelector('.tone.good')).color")
    assert told["healthy"][0] == "Healthy"
    assert told["diverged"][:2] == ["Diverged", "tone bad"]
    assert told[LONG][0] == "Overfitting"
    assert told["damaged"][0] == ""
    assert green not in [pill for _, _, pill in told.values()]


def test_list_sorts_by_column_and_filters_by_kind(listed: Browser) -> None:
    def choose(name: str, value: str) -> None:
        listed.run(f"document.getElementById('{name}').value = '{value}'")
        listed.run(f"document.getElementById('{name}').dispatchEvent(new Event('change'))")

    names = listed.run(
        "[...document.querySelectorAll('#rows .run')].map((row) => row.querySelector('.name').textContent)"
    )
    listed.run("document.querySelector('th[data-by=name] button').click()")
    by_name = "[...document.querySelectorAll('#rows .name')].map((name) => name.textContent)"
    assert listed.run(by_name) == sorted(names)
    listed.run("document.querySelector('th[data-by=name] button').click()")
    assert listed.run(by_name) == sorted(names, reverse=True)
    assert listed.run("document.querySelector('th[data-by=name]').getAttribute('aria-sort')") == "descending"
    choose("order", "result")
    scores = listed.run("[...document.querySelectorAll('#rows .value')].map((cell) => cell.textContent)")
    values = [float(score) for score in scores if score]
    assert values == sorted(values, reverse=True)
    assert scores[len(values) :] == [""] * (len(scores) - len(values)), "a run without a score is sorted between scores"
    choose("kind", "trouble")
    shown = listed.run(SHOWN)
    assert {"diverged", "damaged", "interrupted"} <= set(shown)
    assert "healthy" not in shown
    choose("kind", "")
    listed.run("document.getElementById('filter').value = 'diverged'")
    listed.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
    assert listed.run(SHOWN) == ["diverged"]
    assert listed.console == []
