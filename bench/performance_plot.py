"""Writes the tables of docs/performance.md and draws docs/images/performance.png, from the files in docs/performance/.

    .venv/bin/python bench/performance_plot.py

The bench scripts write those files with --output. A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is
that of a file without its ending. What was not measured yet is said in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunesmith.curves.plot import figure_bytes, new_figure, style_axes
from tunesmith.curves.themes import THEMES, Theme

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
RECORDS = ROOT / "docs" / "performance"
PICTURE = ROOT / "docs" / "images" / "performance.png"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Record = dict[str, Any]
SHAPES = {"minilm": "MiniLM-L6", "bert-base": "BERT-base", "tiny": "tiny BERT"}


def read_record(name: str, folder: Path = RECORDS) -> Record | None:
    """What a bench script wrote; None when it was not run."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def render_page(text: str, folder: Path = RECORDS) -> str:
    """The page with every table made anew."""
    return _TABLE.sub(lambda m: f"{m[1]}{render_table(m[2], read_record(m[2], folder))}\n{m[3]}", text)


def render_table(name: str, record: Record | None) -> str:
    """One table with what it takes to repeat it."""
    if record is None:
        return "*Not measured yet.*"
    lines = MAKERS[name.split("_")[0]](record)
    return "\n".join([describe(record), "", *lines])


def describe(record: Record) -> str:
    """Date, machine, versions, command."""
    versions = record.get("versions", record)
    parts = [record["date"], record.get("machine", record.get("device", ""))]
    parts += [f"{name} {versions[name]}" for name in ("python", "torch", "transformers") if name in versions]
    if record.get("commit"):
        parts.append(f"commit {record['commit']}")
    text = ", ".join(parts) + "."
    if record.get("command"):
        text += f" `{record['command']}`"
    return text + (f" **{record['note'][0].upper()}{record['note'][1:]}.**" if record.get("note") else "")


def make_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown lines; all columns but the first are numbers."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, marks, *rows)]


def engine_table(record: Record) -> list[str]:
    """Steps beside the Trainer; the GPU's file has another form."""
    if "batches" in record:
        return gpu_table(record)
    rows = [
        [f"batch {one['batch']}, {one['name']}", f"{one['step_ms']:,.1f}", f"{one['ratio']:.2f}"]
        for one in record["results"]
    ]
    return make_table(["", "ms a step", "times ours"], rows)


CONTESTANTS = {
    "tunesmith": "tunesmith",
    "our_bf16": "tunesmith's Trainer",
    "trainer_bf16": "transformers.Trainer, bf16",
    "trainer_fp32": "transformers.Trainer, fp32",
    "trainer_bf16_compile": "transformers.Trainer, bf16, compiled",
}


def gpu_table(record: Record) -> list[str]:
    """Steps, whole jobs and memory of bench/engine_gpu.py."""
    rows = []
    for batch, found in record["batches"].items():
        ours = found["tunesmith"]
        for kind, one in found.items():
            rows.append(
                [
                    f"batch {batch}, {CONTESTANTS[kind]}",
                    f"{one['step_ms']:.2f}",
                    f"{one['step_ms'] / ours['step_ms']:.2f}",
                    *(("", "") if "job" not in one else (f"{one['job_s']:.1f}", f"{one['job_s'] / ours['job_s']:.2f}")),
                    f"{one['peak_gb']:.2f}",
                    f"{ours['peak_gb'] / one['peak_gb']:.2f}",
                    f"{one['held_gb']:.2f}",
                ]
            )
    head = ["", "ms a step", "times ours", "whole job s", "times ours", "peak GB", "ours of it", "held GB"]
    return make_table(head, rows)


def predict_table(record: Record) -> list[str]:
    """Prediction."""
    rows = [
        [
            f"{one['work']}, {one['name']}",
            f"{one['rows']:,}",
            f"{one['seconds']:,.2f}",
            f"{one['rows_per_second']:,.1f}",
            f"{one['ratio']:.2f}",
            f"{one['difference']:.0e}",
        ]
        for one in record["results"]
    ]
    return make_table(["", "rows", "seconds", "rows/s", "times ours", "largest difference"], rows)


def sweep_table(record: Record) -> list[str]:
    """Cost against batch size and length."""
    rows = [
        [
            f"{one['sweep']} {one['value']}",
            f"{one['tunesmith_ms']:,.2f}",
            f"{one['trainer_ms']:,.2f}",
            f"{one['ratio']:.2f}",
        ]
        for one in record["results"]
    ]
    return make_table(["", "ours, ms a step", "Trainer, ms a step", "ratio"], rows)


def rows_table(record: Record) -> list[str]:
    """Cost against data size."""
    rows = [
        [
            f"{one['rows']:,} rows, {one['name']}",
            f"{one['step_ms']:.2f}",
            f"{one['order_s']:.3f}" if one["name"] == "tunesmith" else "",
            f"{one['anonymous_mb']:,}",
            f"{one['memory_mb']:,}",
        ]
        for one in record["results"]
    ]
    return make_table(["", "ms a step", "order of an epoch, s", "anonymous MB", "peak MB"], rows)


MAKERS: dict[str, Callable[[Record], list[str]]] = {
    "engine": engine_table,
    "predict": predict_table,
    "sweep": sweep_table,
    "rows": rows_table,
}


def draw(folder: Path = RECORDS) -> Any:
    """A row of panels a device: cost against batch size and row length, then data size or prediction."""
    theme = THEMES["light"]
    found = [(name, read_record(f"sweep_{name}", folder)) for name in ("cpu", "h200")]
    sweeps = [(name, record) for name, record in found if record is not None]
    figure = new_figure(width=11.5, height=3.9 * max(len(sweeps), 1), theme="light")
    parts = figure.subfigures(max(len(sweeps), 1), 1, squeeze=False, hspace=0.04)[:, 0]
    for part, (name, record) in zip(parts, sweeps, strict=False):
        line = part.subplots(1, 3)
        one = record["results"][0]
        what = f"A training step: {SHAPES[one['shape']]}, {one['precision']}, {record['machine']}"
        part.suptitle(what, color=theme.text, fontsize=12.5, fontweight="bold", x=0.012, ha="left")
        draw_sweep(line[0], record, "batch size", theme, title="Batch size (MRPC rows)", x_label="rows in a batch")
        draw_sweep(line[1], record, "row length", theme, title="Row length (batch 8)", x_label="tokens in a row")
        line[0].legend(frameon=False, fontsize=9.5, labelcolor=theme.text, loc="upper left", borderpad=0)
        line[0].set_ylabel("ms a step", color=theme.muted, fontsize=10)
        if name == "cpu":
            draw_rows(line[2], read_record("rows_cpu", folder), theme)
        else:
            draw_prediction(line[2], read_record(f"predict_{name}_bf16", folder), theme)
    return figure


def draw_sweep(axes: Any, record: Record, sweep: str, theme: Theme, *, title: str, x_label: str) -> None:
    """Two lines on logarithmic axes, and how many times apart they are at each point."""
    points = [one for one in record["results"] if one["sweep"] == sweep]
    style_axes(axes, theme, title=title, x_label=x_label)
    x = [one["value"] for one in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    draw_pair(axes, x, [p["tunesmith_ms"] for p in points], [p["trainer_ms"] for p in points], theme)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.22)  # room for the names above the lines
    axes.margins(x=0.13)
    plain_ticks(axes, x, [str(value) for value in x])


def draw_pair(axes: Any, x: list[float], ours: list[float], theirs: list[float], theme: Theme) -> None:
    """Ours and the Trainer's, and how many times theirs is ours at each point."""
    axes.fill_between(x, ours, theirs, color=theme.run(1), alpha=0.07, linewidth=0)
    for values, color, label in ((theirs, theme.run(1), "transformers.Trainer"), (ours, theme.run(0), "tunesmith")):
        axes.plot(x, values, color=color, linewidth=1.9, marker="o", markersize=4.5, label=label)
    steep = max(theirs) > 3 * min(theirs)
    for at, mine, other in zip(x, ours, theirs, strict=True):
        axes.annotate(
            f"{other / mine:.1f}x",
            (at, max(mine, other)),
            xytext=(-4, 4) if steep else (0, 7),  # a rising line leaves room on its left
            textcoords="offset points",
            ha="right" if steep else "center",
            color=theme.muted,
            fontsize=9,
        )


def plain_ticks(axes: Any, x: list[float], labels: list[str]) -> None:
    """The measured points as ticks, and plain numbers up the side."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.xaxis.set_major_locator(FixedLocator(x))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(labels)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def draw_rows(axes: Any, record: Record | None, theme: Theme) -> None:
    """Step time against the rows of the training data."""
    if record is None:
        axes.set_visible(False)
        return
    style_axes(axes, theme, title="Data size (tiny BERT, batch 8)", x_label="rows in the training data")
    by_name = {who: [one for one in record["results"] if one["name"] == who] for who in ("tunesmith", "trainer")}
    x = [one["rows"] for one in by_name["tunesmith"]]
    axes.set_xscale("log")
    draw_pair(axes, x, *([one["step_ms"] for one in by_name[who]] for who in ("tunesmith", "trainer")), theme)
    axes.set_ylim(0, 1.25 * max(one["step_ms"] for one in record["results"]))
    axes.margins(x=0.12)
    plain_ticks(axes, x, [f"{n // 1000:,} k" if n < 10**6 else f"{n / 10**6:g} M" for n in x])


def draw_prediction(axes: Any, record: Record | None, theme: Theme) -> None:
    """Rows a second on the long tail, as bars."""
    if record is None:
        axes.set_visible(False)
        return
    from matplotlib.ticker import MaxNLocator

    lines = [one for one in record["results"] if one["work"] == "long tail"][::-1]
    style_axes(axes, theme, title="Prediction, long tail of lengths", x_label="rows a second")
    ours = [one["name"].startswith("tunesmith") for one in lines]
    bars = axes.barh(
        [one["name"] for one in lines],
        [one["rows_per_second"] for one in lines],
        color=[theme.run(0) if mine else theme.run(1) for mine in ours],
        height=0.62,
    )
    axes.bar_label(bars, [f" {one['rows_per_second']:,.0f}" for one in lines], color=theme.muted, fontsize=8.5)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.margins(x=0.2)


def main() -> None:
    """Writes page and picture."""
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_bytes(figure_bytes(draw(), "png"))
    print(PAGE, PICTURE)


if __name__ == "__main__":
    main()
