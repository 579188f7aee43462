"""The figures in README and in the research pages are those of docs/research/measurements, rounded."""

from __future__ import annotations

import json
import re
import runpy
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from docs.pages import ROOT

RESEARCH = ROOT / "docs" / "research"
MEASUREMENTS = RESEARCH / "measurements"


def measured(name: str) -> Any:
    return json.loads((MEASUREMENTS / name).read_text(encoding="utf-8"))


def words_of(path: str) -> str:
    """Return a page with single spaces and without emphasis."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").replace("**", "").split())


def cpu_steps(batch: int) -> tuple[float, float]:
    """Return ms per step of tunesmith and of transformers with its defaults."""
    times = {(one["batch"], one["name"]): one["step_ms"] for one in measured("engine_cpu.json")["results"]}
    return times[batch, "tunesmith"], times[batch, "Trainer, defaults"]


def gpu_steps(batch: int, kind: str = "trainer_bf16") -> tuple[float, float]:
    found = measured("engine_h200.json")["batches"][str(batch)]
    return found["tunesmith"]["step_ms"], found[kind]["step_ms"]


@pytest.fixture(scope="module")
def recipes() -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        return SimpleNamespace(**runpy.run_path(str(ROOT / "bench" / "recipes.py")))


def gain(recipes: SimpleNamespace, file: str, name: str, against: str, model: str | None = None) -> tuple[float, ...]:
    """Return the mean gain in points and its 95% interval over tasks."""
    runs = [run for run in measured(file) if model in (None, run["model"])]
    return tuple(recipes.mean_with_interval(recipes.paired_gains(runs, name, against)))


def test_readme_speed_figures_match_measurements() -> None:
    page = words_of("README.md")
    for batch in (8, 32):
        ours, theirs = cpu_steps(batch)
        assert f"{theirs / ours:.1f} times" in page
        assert f"{ours:,.0f} vs. {theirs:,.0f} ms" in page
    small, large = (one["speedup"] for one in measured("trainer_cpu.json")["results"] if one["script"] == "unmodified")
    assert f"With `tunesmith.Trainer` in your own script: {small:.1f} and {large:.1f} times" in page
    scripts = measured("scripts_h200.json")["batches"]
    small, large = scripts["16"], scripts["64"]
    theirs, ours = small["unmodified"]["ms"].values()
    assert f"{theirs / ours:.1f} times as fast at batch size 16 ({ours:.1f} vs. {theirs:.1f} ms)" in page
    assert f"{large['unmodified']['ratio']:.1f} times at 64" in page
    own = [batch["compute_loss override"]["ratio"] for batch in (small, large)]
    assert f"With an overridden `compute_loss`: {own[0]:.1f} and {own[1]:.1f} times" in page


def test_readme_fault_figures_match_measurements() -> None:
    kills = measured("faults.json")["results"][0]
    assert kills["fault"].startswith("30 kills")
    assert kills["tunesmith"] == {"identical": 30}
    assert f"With `transformers.Trainer`, {kills['transformers']['cannot resume']} can't be resumed" in words_of(
        "README.md"
    )


def test_readme_score_gain_matches_measurements(recipes: SimpleNamespace) -> None:
    mean, low, high = gain(recipes, "pairs_h200.json", "auto", "hf_seconds")
    assert f"{mean:.1f} points above the defaults of transformers" in words_of("README.md")
    assert f"(95% interval {low:.1f} to {high:.1f})" in words_of("README.md")


def test_diagnosis_figures_match_measurements() -> None:
    found = {(one["runs_used"], one["rules"]): one for one in measured("diagnosis.json")["results"]}
    whole = found["whole", True]
    share = f"{whole['right'] / whole['runs']:.0%}"
    assert f"{whole['right']} of {whole['runs']} runs ({share})" in words_of("README.md")
    for page in ("docs/decisions/0012-fitted-diagnosis.md", "docs/guides/read_the_curves.md"):
        assert share in words_of(page)
    page = words_of("docs/research/diagnosis.md")
    for one in found.values():
        assert f"{one['right']} ({one['right'] / one['runs']:.0%})" in page
        assert f"{one['alarms']} of {one['well']}" in page


def test_performance_tables_match_measurements() -> None:
    page = (RESEARCH / "performance.md").read_text(encoding="utf-8")
    rows = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in page.splitlines() if "|" in line}
    for batch in (8, 32):
        ours, theirs = cpu_steps(batch)
        assert (str(batch), "transformers, defaults", f"{theirs:,.0f}", f"{theirs / ours:.2f}") in rows
    for one in measured("trainer_cpu.json")["results"]:
        times = tuple(f"{one[kind]:,.0f}" for kind in ("transformers_ms", "tunesmith_ms"))
        assert (str(one["batch"]), *times, f"{one['speedup']:.2f}") in {row[-4:] for row in rows}
    names = {"our_bf16": "tunesmith `Trainer`, bf16", "trainer_bf16": "transformers, bf16"}
    names |= {"tunesmith": "tunesmith, bf16", "trainer_fp32": "transformers, float32"}
    for batch in (8, 64, 256):
        for kind, name in names.items():
            ours, theirs = gpu_steps(batch, kind)
            peak = measured("engine_h200.json")["batches"][str(batch)][kind]["peak_gb"]
            assert (str(batch), name, f"{theirs:.1f}", f"{theirs / ours:.1f}", f"{peak:.1f}") in rows
    table = page[page.index("### Scripts with `Trainer` on an H200") :]
    shown = [
        tuple(c.strip() for c in line.strip("|").split("|")) for line in table.splitlines() if line.startswith("| ")
    ]
    for batch, scripts in measured("scripts_h200.json")["batches"].items():
        for one in scripts.values():
            theirs, ours = one["ms"].values()
            memory = one["peak_gb"]["tunesmith"] / one["peak_gb"]["transformers"]
            row = (batch, f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}", f"{memory:.2f}")
            assert row in {(cells[1], *cells[3:]) for cells in shown if len(cells) == 7}
    first = list(measured("engine_loop_h200.json")["first_step"].values())
    assert f"the first step comes after {first[0]:.1f} s instead of {first[1]:.1f} s" in page
    loop = measured("engine_loop_h200.json")["batches"]
    small, large = loop["8"]["tunesmith"], loop["64"]["tunesmith"]
    assert f"{small['step_ms']:.1f} ms at batch size 8 and {large['step_ms']:.1f} ms at 64" in page
    assert f"3 epochs of MRPC take {small['job_seconds']:.1f} s" in page
    families = {"DeBERTa-v3": "deberta-v3-base", "ModernBERT": "modernbert-base", "MPNet": "mpnet-base"}
    for name, shape in families.items():
        for batch, found in measured("families_h200.json")["shapes"][shape].items():
            ms = found["ms"]
            times = [f"{ms[kind]:.1f}" for kind in ("ours", "trainer_bf16", "trainer_fp32")]
            assert (name, batch, *times, f"{found['ratio']:.1f}") in rows


@pytest.mark.parametrize(
    ("file", "name", "against", "model"),
    [
        ("pairs_h200.json", "auto", "hf_seconds", None),
        ("pairs_h200.json", "auto", "hf_equal", None),
        ("pairs_sizes_h200.json", "auto", "hf_seconds", None),
        ("recipes_h200.json", "auto", "hf_equal", None),
        ("recipes_h200_outside.json", "auto", "hf_equal", "granite-embedding-30m-english"),
        ("pairs_sizes_h200.json", "pair_start off", "auto", "granite-embedding-30m-english"),
        ("pairs_h200.json", "pair_start off", "auto", "all-MiniLM-L6-v2"),
        ("pairs_sizes_h200.json", "pair_start off", "auto", "all-MiniLM-L6-v2"),
        ("few_labels_h200.json", "auto", "setfit", "all-MiniLM-L6-v2"),
        ("few_labels_h200.json", "auto", "setfit", "paraphrase-MiniLM-L3-v2"),
    ],
)
def test_recipe_gains_match_measurements(
    recipes: SimpleNamespace, file: str, name: str, against: str, model: str | None
) -> None:
    mean, low, high = gain(recipes, file, name, against, model)
    assert f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" in words_of("docs/research/recipes.md")


def test_worst_large_single_text_task_matches_measurements(recipes: SimpleNamespace) -> None:
    pairs = {"mrpc", "newspair", "same_source", "sick", "sts", "whale_next"}
    gains = [
        (statistics.fmean(points), task, size)
        for file in ("pairs_h200.json", "recipes_h200.json", "recipes_h200_outside.json")
        for (_, task, size), points in recipes.paired_gains(measured(file), "auto", "hf_equal").items()
        if task not in pairs and (size >= 1400 or not size)
    ]
    gain, task, size = min(gains)
    assert f"equal epochs is {task} with {size:,}: {gain:+.1f} (2 seeds)" in words_of("docs/research/recipes.md")


def test_ordered_class_scores_match_measurements(recipes: SimpleNamespace) -> None:
    runs, page = measured("ordered_cpu.json"), words_of("docs/research/recipes.md")
    gains = recipes.paired_gains(runs, "auto", "hf_equal")
    assert {len(points) for points in gains.values()} == {3}, "three seeds"
    for (_, task, _), points in gains.items():
        means = [
            100 * statistics.fmean(run["score"] for run in runs if (run["task"], run["recipe"]) == (task, recipe))
            for recipe in ("auto", "hf_equal")
        ]
        row = f"{means[0]:.1f} | {means[1]:.1f} | {statistics.fmean(points):+.1f} |"
        assert re.search(rf"\| {task}, [a-z-]+ task \| {re.escape(row)}", page)


@pytest.mark.parametrize("file", ["pairs_h200.json", "pairs_sizes_h200.json"])
def test_growth_of_pair_tasks_matches_measurements(recipes: SimpleNamespace, file: str) -> None:
    page = (
        (RESEARCH / "recipes.md").read_text(encoding="utf-8").partition("The score grows with")[2].partition("## ")[0]
    )
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith(f"| `{file}`")]
    found = recipes.growth(measured(file))
    assert len(rows) == 3
    for _, model, tasks, _, smallest in rows:
        name = model.split(",")[0].replace("Random weights", "random-MiniLM-L6").replace("30m", "30m-english")
        points = [list(found[name, task].values()) for task in tasks.split(", ")]
        assert smallest == f"{min(large - small for small, large in points):+.1f} |"


def test_distillation_table_matches_measurements() -> None:
    runs = measured("distillation.json")["results"]
    found = {(run["task"], run["seed"], run["model"]): run for run in runs}
    page = words_of("docs/research/recipes.md")
    for run in runs:
        if run["model"].startswith("student "):
            names = ("auto", "folds", "auto, temperature of best")
            auto, folds, scaled = (found[run["task"], run["seed"], name] for name in names)
            points = [f"{100 * (one['accuracy'] - auto['accuracy']):+.1f}" for one in (folds, run)]
            errors = [f"{one['calibration_error']:.3f}" for one in (auto, scaled, run)]
            first = [run["task"], str(run["seed"]), f"{run['unlabeled']:,}", run["model"].removeprefix("student ")]
            cells = [*first, *points, f"{run['cpu_seconds'] / auto['cpu_seconds']:.1f}", *errors]
            assert f"| {' | '.join(cells)} |" in page


def test_every_measurement_file_is_described_on_a_research_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in RESEARCH.glob("*.md"))
    files = {path.name for path in MEASUREMENTS.iterdir()}
    assert {name for name in files if name not in pages} == set()
    assert set(re.findall(r"\b[a-z_0-9]+\.(?:json\.gz|npz)\b", pages)) <= files


def test_abstaining_table_matches_measurements() -> None:
    page = (RESEARCH / "abstain.md").read_text(encoding="utf-8")
    found = measured("abstain.json")["results"]
    for one in found:
        shares = [f"{one[name]:.2f}" for name in ("coverage", "known_threshold", "best_possible")]
        limits = [f"{one['calibration_examples']:,}", f"{one['error']:.1%}", f"{one['limit']:.1%}"]
        cells = [one["task"], *limits, str(one["exceeded"]), str(one["refused"]), *shares]
        assert f"| {' | '.join(cells)} |" in page
    exceeded, draws = (sum(one[name] for one in found) for name in ("exceeded", "draws"))
    answered = draws - sum(one["refused"] for one in found)
    assert f"{exceeded} of {draws:,} splits ({exceeded / draws:.1%})" in words_of("docs/research/abstain.md")
    assert f"{answered:,} splits with a threshold ({exceeded / answered:.1%})" in words_of("docs/research/abstain.md")


def test_machine_label_figures_match_measurements() -> None:
    page = words_of("docs/research/machine_labels.md")
    runs = measured("gold_labels.json")
    for llm, name in ((True, "yes"), (False, "no")):
        held_out = [one for one in runs if one["llm_label"] is llm and one["task"] in ("trec", "subj", "news6")]
        right, wrong, corrected = (sum(one["probe"][k] for one in held_out) for k in range(3))
        assert f"{(corrected - wrong) / (right - wrong):.0%}" in page
        for task in {one["task"] for one in runs}:
            some = [one for one in runs if one["task"] == task and one["llm_label"] is llm]
            right, wrong, corrected = (100 * sum(one["probe"][k] for one in some) / len(some) for k in range(3))
            cells = f"{right:.1f} | {wrong:.1f} | {corrected:.1f}"
            assert re.search(rf"\| {task} \| {name} \| [^\n]*{re.escape(cells)}", page)
    assert min(one["probe"][2] - one["probe"][1] for one in runs) >= -0.0005


def test_more_columns_tables_match_measurements() -> None:
    lines = (MEASUREMENTS / "more_columns.jsonl").read_text(encoding="utf-8").splitlines()
    page = words_of("docs/research/more_columns.md")
    runs = [{**one, "count": len(one["columns"])} for one in map(json.loads, lines)]
    rounded = [one for one in runs if not one["exact"]]
    gains, costs = [], []
    for task, seeds in {"titanic": 2, "airports": 2, "cities": 1}.items():
        few = [one for one in rounded if one["task"] == task and one["seed"] == 0 and one["count"] < 3]
        best = max(few, key=lambda one: one["selection"])["columns"]
        for seed in range(seeds):
            of_seed = [one for one in rounded if (one["task"], one["seed"]) == (task, seed)]
            (pair,) = [100 * one["accuracy"] for one in of_seed if one["columns"] == best]
            every, useless = (100 * one["accuracy"] for n in (4, 5) for one in of_seed if one["count"] == n)
            gains.append(every - pair)
            costs.append(every - useless)
            cells = f"{pair:.1f} ({', '.join(best)}) | {every:.1f} | {every - pair:+.1f} | {useless:.1f}"
            cells += f" | {useless - every:+.1f}"
            assert f"| {task} | {seed} | {cells} |" in page
    assert f"all columns are {-statistics.mean(gains):.1f} points worse" in page
    assert f"a useless column costs {statistics.mean(costs):.1f} points" in page
    assert f"two more columns cost {-gains[-1]:.1f} points" in page
    for exact in (one for one in runs if one["exact"]):
        (one,) = [one for one in rounded if all(one[name] == exact[name] for name in ("task", "seed", "columns"))]
        assert f"| {one['task']} | {100 * exact['accuracy']:.1f} | {100 * one['accuracy']:.1f} |" in page


def test_verdicts_of_a_person_match_measurements() -> None:
    verdicts, page = measured("verdicts.json"), words_of("docs/research/diagnosis.md")
    assert f"{sum(run['agrees'] for run in verdicts.values())} of {len(verdicts)} agree" in page
    for name, run in verdicts.items():
        person = ", ".join(run["person"]).replace("_", " ")
        agrees = "yes" if run["verdict"] in run["person"] else "no"
        assert f"| {name} | {person} | {run['verdict'].replace('_', ' ')} | {agrees} |" in page


def test_label_noise_figures_match_measurements() -> None:
    page = words_of("docs/research/diagnosis.md")
    for model in ("all-MiniLM-L6-v2", "paraphrase-MiniLM-L3-v2"):
        for examples in (300, 1000):
            for kind in ("clean", "noisy"):
                runs = [
                    r
                    for r in measured("label_noise.json")
                    if (r["model"], r["examples"], r["validation"]) == (model, examples, kind)
                ]
                planted = [r for r in runs if r["planted"]]
                estimated = [
                    r for r in planted if r["estimate"] and r["estimate"]["high"] - r["estimate"]["low"] <= 0.2
                ]
                near = sum(abs(r["estimate"]["share"] - r["planted"]) < 0.0501 for r in estimated)
                inside = sum(r["estimate"]["low"] <= r["planted"] <= r["estimate"]["high"] for r in estimated)
                count = f"{len(estimated)} of {len(planted)}"
                if model == "all-MiniLM-L6-v2":
                    assert (
                        f"| {examples:,} | {kind} | {count} | {near} of {len(estimated)} | {inside} of {len(estimated)} |"
                        in page
                    )
                elif examples == 1000 and kind == "clean":
                    assert (
                        f"{count} runs with 1,000 examples and clean validation labels were estimated, {near} of them"
                        in page
                    )
                elif examples == 1000:
                    assert f"with noisy validation labels {count}, {near} within 5 points" in page
