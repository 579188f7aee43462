"""Writes the tables of docs/research/performance.md and draws docs/images/performance.png, from the files in docs/research/performance/.

    .venv/bin/python bench/performance_plot.py

The bench scripts write those files with --output. A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is
that of a file without its ending. A table without a file says that it was not measured yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from performance_tables import RECORDS, Record, read_record, render_page
from tunesmith.report.plots import THEMES, Theme, figure_bytes, new_figure, style_axes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "performance.png"
SHAPES = {"minilm": "MiniLM-L6", "bert-base": "BERT-base", "tiny": "tiny BERT"}


def draw(folder: Path = RECORDS) -> Any:
    """A row of panels a device."""
    theme = THEMES["light"]
    sweep, gpu = read_record("sweep_cpu", folder), read_record("engine_h200", folder)
    rows = [row for row, record in ((draw_cpu, sweep), (draw_gpu, gpu)) if record is not None]
    figure = new_figure(width=11.5, height=3.9 * max(len(rows), 1), theme="light")
    parts = figure.subfigures(max(len(rows), 1), 1, squeeze=False, hspace=0.04)[:, 0]
    for part, row in zip(parts, rows, strict=False):
        line = part.subplots(1, 3)
        what = row(line, folder, theme)
        part.suptitle(what, color=theme.text, fontsize=12.5, fontweight="bold", x=0.012, ha="left")
        line[0].legend(frameon=False, fontsize=9.5, labelcolor=theme.text, loc="upper left", borderpad=0)
        line[0].set_ylabel("ms a step", color=theme.muted, fontsize=10)
    return figure


def draw_cpu(line: Any, folder: Path, theme: Theme) -> str:
    """Batch size, row length, data size."""
    record = read_record("sweep_cpu", folder)
    assert record is not None
    one = record["results"][0]
    kinds = (
        ("batch size", "Batch size (MRPC rows)", "rows in a batch"),
        ("row length", "Row length (batch 8)", "tokens in a row"),
    )
    for axes, (sweep, title, x_label) in zip(line, kinds, strict=False):
        points = [point for point in record["results"] if point["sweep"] == sweep]
        times = ([p[f"{who}_ms"] for p in points] for who in ("tunesmith", "trainer"))
        draw_costs(axes, [p["value"] for p in points], *times, theme, title=title, x_label=x_label)
    draw_rows(line[2], read_record("rows_cpu", folder), theme)
    return f"A training step: {SHAPES[one['shape']]}, {one['precision']}, {record['machine']}"


def draw_gpu(line: Any, folder: Path, theme: Theme) -> str:
    """Batch size beside the faster Trainer, memory beside the leaner one, prediction."""
    record = read_record("engine_h200", folder)
    assert record is not None
    for axes, what, title in ((line[0], "step_ms", "Batch size (MRPC rows)"), (line[1], "peak_gb", "Peak memory, GB")):
        found = record["batches"].values()
        theirs = [min(one[what] for kind, one in batch.items() if kind.startswith("trainer")) for batch in found]
        sizes = [int(size) for size in record["batches"]]
        mine = [batch["tunesmith"][what] for batch in found]
        draw_costs(axes, sizes, mine, theirs, theme, title=title, x_label="rows in a batch")
    draw_prediction(line[2], read_record("predict_h200_bf16", folder), theme)
    return f"A training step: BERT-base, the better of the Trainer's bf16 and fp32, {record['device']}"


def draw_costs(
    axes: Any, x: list[float], ours: list[float], theirs: list[float], theme: Theme, *, title: str, x_label: str
) -> None:
    """Two lines on logarithmic axes, and how many times apart they are at each point."""
    style_axes(axes, theme, title=title, x_label=x_label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    draw_pair(axes, x, ours, theirs, theme)
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
