"""The report is complete, small and safe, and shows the right numbers."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunesmith.events import Event, RunStarted, StepDone
from tunesmith.report.build import build_report, content_policy, embed_json, render_report, write_report
from tunesmith.runs.event_log import Journal


class Tags(HTMLParser):
    """Collects start tags with their attributes, and script contents."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._inside = True
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


def events_of(synthetic: SimpleNamespace) -> list[Event]:
    events: list[Event] = synthetic.make_run(
        [0.5, 0.3, 0.15, 0.06], [0.45, 0.40, 0.46, 0.63], accuracy=[0.78, 0.85, 0.86, 0.85], train_rows=3668
    )
    return events


@pytest.fixture(scope="module")
def page(synthetic: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    synthetic.make_folder(folder, events_of(synthetic))
    return write_report(build_report(folder), folder / "report.html").read_text(encoding="utf-8")


def test_report_is_small_and_makes_no_requests(page: str) -> None:
    assert len(page.encode()) < 2_000_000
    for tag, attributes in parse(page).tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, name, value)


def test_report_has_one_script_and_no_inline_handlers(page: str) -> None:
    found = parse(page)
    kinds = [a.get("type") for tag, a in found.tags if tag == "script"]
    assert kinds == ["application/json", None]
    for tag, attributes in found.tags:
        assert "style" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes), tag
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert "unsafe" not in policy
    assert policy == content_policy(re.findall(r"<style>(.*?)</style>", page, re.DOTALL)[0], found.scripts[1])


def test_report_data_equals_the_event_log(page: str, synthetic: SimpleNamespace) -> None:
    data = json.loads(parse(page).scripts[0])
    points = {series["name"]: series["points"] for series in data["loss"]["series"]}
    done = [e for e in events_of(synthetic) if isinstance(e, StepDone)]
    assert [x for x, _ in points["training"]] == [e.step for e in done]
    assert points["training"][7][1] == pytest.approx(done[7].loss, rel=1e-5)
    assert points["validation"] == [[100, 0.45], [200, 0.40], [300, 0.46], [400, 0.63]]


def test_report_contains_every_section(page: str) -> None:
    for words in (
        "Overfitting",
        "rose 0.40 to 0.63 after step 200",
        "--num_train_epochs</span> 3",
        "95% interval",
        "Confusion matrix",
        "Reliability",
        "Most confident mistakes",
        "37 rows (1.0%) truncated to 96 tokens",
        "tunesmith train --train_file &#39;it&#39;&#34;&#39;&#34;&#39;s pairs.csv&#39;",
        "equivalent 2,474 (67%)",
        "bert-base-uncased",
    ):
        assert words in page, words


def test_plots_have_alt_text_and_headings_are_nested(page: str) -> None:
    found = parse(page).tags
    assert all((a.get("alt") or "").strip() for tag, a in found if tag == "img")
    levels = [int(tag[1]) for tag, _ in found if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert next(a for tag, a in found if tag == "html").get("lang") == "en"
    ids = [a["id"] for _, a in found if "id" in a]
    assert len(ids) == len(set(ids))
    anchors = {a["href"] for tag, a in found if tag == "a"}
    assert anchors <= {f"#{i}" for i in ids}


def test_hostile_text_is_escaped(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    synthetic.make_folder(tmp_path, events_of(synthetic), hostile=True)
    found = parse(render_report(build_report(tmp_path)))
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert "svg onload" not in " ".join(f"{t} {' '.join(a)}" for t, a in found.tags)
    assert not any(name.startswith("on") for _, a in found.tags for name in a)


def test_run_with_only_its_first_event_has_a_report(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(RunStarted("r", 0, 100, 10.0, 10.0, 80))
    page = render_report(build_report(tmp_path))
    assert "Not enough evidence" in page
    assert "No evaluation has been made yet" in page


def test_report_mentions_nan_or_infinite_loss(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for event in synthetic.make_run([0.5, 0.3], [0.5, 0.4], nan_after=150):
            journal.append(event)
    page = render_report(build_report(tmp_path))
    assert "Diverged" in page
    assert "NaN or infinite at step 151" in page
    data = json.loads(parse(page).scripts[0])
    assert data["loss"]["series"][0]["points"][-1] == [151, None]


def test_embedded_json_cannot_end_its_element() -> None:
    text = embed_json({"name": "</script><!--<script>&"})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"name": "</script><!--<script>&"}
