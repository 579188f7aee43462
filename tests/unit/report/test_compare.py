"""Comparison of runs: only differences, tested on the same examples, and no claim without evidence."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tunesmith.cli.main import main
from tunesmith.errors import ConfigError
from tunesmith.report.build import render_comparison
from tunesmith.report.compare import NO_EVIDENCE, compare_runs


@pytest.fixture
def make(tmp_path: Path, synthetic: SimpleNamespace):
    """Return a function that writes a run folder in which `flips` correct predictions become wrong."""

    def folder(
        name: str, *, flips: int = 0, options: dict[str, str] | None = None, seed: int = 0, hostile: bool = False
    ) -> Path:
        events = synthetic.make_run([0.5, 0.3, 0.2], [0.45, 0.4, 0.42], accuracy=[0.7, 0.8, 0.8], seed=len(name))
        path = synthetic.make_folder(tmp_path / name, events, seed=seed, hostile=hostile)
        text = (path / "run.yaml").read_text()
        for option, value in (options or {}).items():
            text = re.sub(rf"^{option}: .*\n", "", text, flags=re.MULTILINE) + f"{option}: {value}\n"
        (path / "run.yaml").write_text(text)
        if flips:
            edit(path, lambda table: flip(table, flips))
        return path

    return folder


def edit(path: Path, change) -> None:
    table = pq.read_table(path / "predictions.parquet").to_pydict()
    change(table)
    pq.write_table(pa.table(table), path / "predictions.parquet")


def flip(table, count: int, skip: int = 0) -> None:
    names = [c.removeprefix("prob_") for c in table if c.startswith("prob_")]
    right = [k for k, (a, b) in enumerate(zip(table["label"], table["prediction"], strict=True)) if a == b]
    random.Random(0).shuffle(right)
    for k in right[skip : skip + count]:
        table["prediction"][k] = next(n for n in names if n != table["label"][k])
        a, b = (f"prob_{n}" for n in names)
        table[a][k], table[b][k] = table[b][k], table[a][k]


def test_only_options_that_differ_are_listed(make) -> None:
    found = compare_runs([make("a"), make("b", options={"learning_rate": "1e-4", "run_name": "other", "seed": "7"})])
    assert dict(found.differences) == {"learning_rate": ("5e-05", "0.0001"), "seed": ("(not recorded)", "7")}
    assert found.same_options == 4


def test_clearly_worse_run_is_reported_with_numbers(make) -> None:
    found = compare_runs([make("a"), make("b", flips=60, options={"learning_rate": "1e-2"})])
    test = found.tests[0]
    assert test.different
    assert test.sentence.startswith("B is worse than A: accuracy -0.147 [")
    assert "for the settings" in test.sentence
    assert "for these two models, 408 validation rows, McNemar exact" in test.sentence
    assert any("two or three seeds" in note for note in found.notes)


def test_difference_within_seed_noise_is_no_evidence(make) -> None:
    a, b = make("a", flips=40), make("b")
    edit(b, lambda table: flip(table, 66, skip=40))
    test = compare_runs([a, b]).tests[0]
    assert not test.different
    assert test.sentence.startswith(f"{NO_EVIDENCE} beyond the variation between seeds: accuracy -0.064 [")
    assert "p = 0.17 for the settings, 0.015 for these two models" in test.sentence
    assert test.result is not None
    assert test.result.low is not None
    assert test.result.high is not None
    assert test.result.low < -0.064 < 0 <= test.result.high


def test_label_ids_in_different_order_match_by_name(make) -> None:
    a, b = make("a"), make("b", flips=60)
    straight = compare_runs([a, b]).tests[0].sentence
    summary = json.loads((b / "data_summary.json").read_text())
    summary["labels"].reverse()
    (b / "data_summary.json").write_text(json.dumps(summary))
    assert compare_runs([a, b]).tests[0].sentence == straight


def drop_row(table) -> None:
    for column, values in table.items():
        table[column] = values[1:]


def change_text(table) -> None:
    table["sentence1"][3] = "another text"


def change_label(table) -> None:
    table["label"][3] = "equivalent" if table["label"][3] != "equivalent" else "not_equivalent"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (drop_row, "1 of 408 rows are not in the other run, which has 0 others"),
        (change_text, "1 of 408 rows are not in the other run, which has 1 others"),
        (change_label, "1 of 408 validation rows have a different label"),
    ],
)
def test_different_rows_are_not_paired_with_the_reason(make, change, word: str) -> None:
    a, b = make("a"), make("b", flips=100)
    edit(b, change)
    test = compare_runs([a, b]).tests[0]
    assert test.sentence.startswith("not tested: ")
    assert word in test.sentence
    assert test.result is None
    assert not test.different


def test_runs_of_different_tasks_are_not_paired(make) -> None:
    a, b = make("a"), make("b")
    summary = json.loads((b / "data_summary.json").read_text())
    summary["labels"] = ["equivalent", "other"]
    (b / "data_summary.json").write_text(json.dumps(summary))
    assert "Only runs of one task" in compare_runs([a, b]).tests[0].sentence


def test_scores_and_options_compare_without_predictions(make) -> None:
    a, b = make("a"), make("b", options={"learning_rate": "1e-4"})
    (b / "predictions.parquet").unlink()
    found = compare_runs([a, b])
    assert "predictions.parquet of B" in found.tests[0].sentence
    assert found.differences
    assert found.scores


def test_split_is_preferred_and_split_can_be_set(make) -> None:
    a, b = make("a"), make("b")
    for path in (a, b):
        edit(path, lambda table: table.update(split=["test"] * 100 + ["validation"] * 308))
    edit(b, lambda table: flip(table, 90))
    assert compare_runs([a, b]).tests[0].split == "test"
    chosen = compare_runs([a, b], split="validation").tests[0]
    assert chosen.split == "validation"
    assert chosen.result is not None
    assert chosen.result.n == 308
    assert "called 'nope'" in compare_runs([a, b], split="nope").tests[0].sentence


def test_several_runs_share_one_error_rate(make) -> None:
    alone = compare_runs([make("a"), make("b", flips=24)]).tests[0]
    assert alone.p_value is not None
    several = compare_runs([make("a1"), make("b1", flips=24), make("c1"), make("d1")])
    assert several.tests[0].p_value == pytest.approx(min(1.0, 3 * alone.p_value))
    assert "Holm, 3 tests" in several.tests[0].sentence


def test_other_metrics_are_tested_by_resampling(make) -> None:
    found = compare_runs([make("a"), make("b", flips=60)], metric="f1_macro").tests[0]
    assert found.different
    assert "f1_macro" in found.sentence
    assert "permutation test" in found.sentence
    worse = compare_runs([make("e"), make("f", flips=60)], metric="log_loss").tests[0]
    assert worse.sentence.startswith("B is worse"), "a higher log loss is worse"


def test_multilabel_runs_are_paired(make) -> None:
    a, b = make("a"), make("b")

    def as_lists(table) -> None:
        for column in ("label", "prediction"):
            table[column] = [[v] for v in table[column]]

    for path in (a, b):
        summary = json.loads((path / "data_summary.json").read_text()) | {"task": "multilabel"}
        (path / "data_summary.json").write_text(json.dumps(summary))
        edit(path, as_lists)
    test = compare_runs([a, b]).tests[0]
    assert test.sentence.startswith(f"{NO_EVIDENCE}: f1_micro")


def test_run_is_not_compared_with_itself_or_nothing(make) -> None:
    a = make("a")
    with pytest.raises(ConfigError, match="named twice"):
        compare_runs([a, a])
    with pytest.raises(ConfigError, match="2 to 8"):
        compare_runs([a])


def test_difference_between_seeds_is_reported_as_chance(make) -> None:
    found = compare_runs([make("a", options={"seed": "1"}), make("b", flips=60, options={"seed": "2"})])
    assert any("differ only in their seed" in note for note in found.notes)


def test_comparison_page_is_self_contained_and_safe(make) -> None:
    page = render_comparison(compare_runs([make("a", hostile=True), make("b", hostile=True, flips=20)]))
    assert page.count("<script>") == 1
    assert "<img src=x" not in page
    assert "unsafe-inline" not in page
    assert "script-src &#39;sha256-" in page
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert len(page) < 2_000_000


def test_compare_prints_tables_and_writes_page(make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make("a"), make("b", flips=60, options={"learning_rate": "1e-2"})
    out = tmp_path / "deep" / "compare.html"
    assert main(["compare", str(a), str(b), "--output", str(out)]) == 0
    said = capsys.readouterr().out
    assert "learning_rate  5e-05  0.01" in said
    assert "B is worse than A" in said
    assert "validation accuracy" in said
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["compare", str(a)]) == 2


def test_comparison_uses_labels_from_moved_thresholds(make) -> None:
    a, b = make("a"), make("b")
    edit(
        b, lambda table: table.update(prediction=[table["label"][0]] * len(table["label"]))
    )  # probabilities stay unchanged unchanged
    test = compare_runs([a, b], metric="accuracy").tests[0]
    assert test.result is not None
    assert test.result.value_b != test.result.value_a
    assert test.different


def test_reordered_rows_are_matched(make) -> None:
    a, b = make("a"), make("b", flips=60)

    def shuffle(table) -> None:
        order = list(range(408))
        random.Random(1).shuffle(order)
        for column, values in table.items():
            table[column] = [values[k] for k in order]

    straight = compare_runs([a, b]).tests[0].sentence
    edit(b, shuffle)
    assert compare_runs([a, b]).tests[0].sentence == straight
