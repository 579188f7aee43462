"""Plots of all kinds of runs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tunesmith.events import StepDone
from tunesmith.report.plots import DARK, LIGHT, darken, draw_curves, figure_bytes
from tunesmith.runs.event_log import Curves, curves_from_events


@pytest.fixture
def curves(synthetic: SimpleNamespace) -> Curves:
    return curves_from_events(
        synthetic.make_run([0.5, 0.3, 0.1], [0.45, 0.40, 0.55], accuracy=[0.78, 0.85, 0.84]), name="$a_b^ <script>"
    )


def test_validation_line_has_the_logged_values(curves: Curves) -> None:
    loss, metric = draw_curves(curves).axes
    lines = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in [*loss.lines, *metric.lines]}
    assert lines["training sample"] == curves.metric("train_sample", "accuracy").value.tolist()
    assert [0.45, 0.40, 0.55] in [np.asarray(line.get_ydata()).tolist() for line in loss.lines]
    assert [0.78, 0.85, 0.84] in [np.asarray(line.get_ydata()).tolist() for line in metric.lines]


@pytest.mark.parametrize("scores", [[0.6, 0.6, 0.6], [0.5, 0.7, 0.9], [0.9, 0.7, 0.5]])
def test_plot_texts_do_not_overlap_points_or_each_other(synthetic: SimpleNamespace, scores: list[float]) -> None:
    events = synthetic.make_run([0.5, 0.3, 0.1], [0.45, 0.40, 0.55], accuracy=scores, metric="matthews_correlation")
    figure = draw_curves(curves_from_events(events))
    figure.canvas.draw()
    for panel in figure.axes:
        notes = [note for note in panel.texts if "best: step" in note.get_text()]
        assert len(notes) == 1
        words = [t for t in (*notes, panel.xaxis.label, panel._left_title, panel.get_legend()) if t is not None]
        boxes = [word.get_window_extent() for word in words]
        assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
        points = panel.transData.transform([xy for line in panel.lines for xy in line.get_xydata()])
        assert not any(box.contains(*point) for box in boxes for point in points)


def test_several_runs_share_one_plot_with_names(curves: Curves, synthetic: SimpleNamespace) -> None:
    other = curves_from_events(synthetic.make_run([0.5], [0.45]), name="second")
    figure = draw_curves([curves, other])
    assert "second" in figure.axes[0].get_legend_handles_labels()[1]
    assert figure_bytes(figure, "png")


def test_nan_or_infinite_step_is_marked(synthetic: SimpleNamespace) -> None:
    figure = draw_curves(curves_from_events(synthetic.make_run([0.5, 0.3], [0.5, 0.4], nan_after=150)))
    assert "NaN or infinite" in figure.axes[0].get_legend_handles_labels()[1]


def test_one_spike_does_not_flatten_the_curve(synthetic: SimpleNamespace) -> None:
    events = synthetic.make_run([0.5, 0.3, 0.2], [0.5, 0.4, 0.4])
    events = [
        StepDone(**{**{f: getattr(e, f) for f in e.__slots__}, "loss": 400.0})
        if e.step == 50 and isinstance(e, StepDone)
        else e
        for e in events
    ]
    assert draw_curves(curves_from_events(events)).axes[0].get_ylim()[1] < 3


def test_run_without_points_is_plotted() -> None:
    nothing = curves_from_events([])
    assert figure_bytes(draw_curves(nothing), "svg")


def test_dark_plot_has_no_light_color(curves: Curves) -> None:
    light = figure_bytes(draw_curves([curves, curves]), "svg")
    dark = darken(light)
    assert b"#ffffff" in light
    assert not any(color.encode() in dark for color in (LIGHT.background, LIGHT.text, LIGHT.muted, *LIGHT.runs))
    assert DARK.background.encode() in dark


def test_unknown_mplbackend_does_not_break_plots() -> None:
    code = "from tunesmith.report.plots import new_figure; new_figure(width=1, height=1)"
    environment = {**os.environ, "MPLBACKEND": "junk", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
