"""THE panels of a run: which there are, their titles and lines. PNG, SVG, report, board and terminal draw these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunesmith.curves.series import Curves, Series

LineKind = Literal["raw", "smooth", "points", "dashed"]
PanelSide = Literal["train", "validation"]


@dataclass(frozen=True, slots=True, eq=False)
class PanelLine:
    """One curve of a panel; `kind` says how it is drawn, `side` which rows it was measured on."""

    name: str
    kind: LineKind
    side: PanelSide
    series: Series


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """What one panel of one run shows. `metric` is the name of what an evaluation measured, "" for other quantities."""

    key: str
    title: str
    lines: tuple[PanelLine, ...]
    metric: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(len(line.series.finite()) for line in self.lines)


def main_panels(curves: Curves, metric: str | None = None) -> list[Panel]:
    """Loss and metric, the panels to show first; `metric` is the main one unless given."""
    loss, unseen = curves.train_loss, curves.metric("validation", "loss")
    lines: tuple[PanelLine, ...] = (
        PanelLine("training", "raw", "train", loss),
        PanelLine("smoothed", "smooth", "train", loss.smoothed()),
        PanelLine("validation", "points", "validation", unseen),
    )
    panels = [Panel("loss", "Loss", lines, "loss")]
    metric = metric or curves.main_metric()
    if metric:
        seen, unseen = curves.metric("train_sample", metric), curves.metric("validation", metric)
        lines = (
            PanelLine("training sample", "dashed", "train", seen),
            PanelLine("validation", "points", "validation", unseen),
        )
        panels.append(Panel("metric", metric[:1].upper() + metric[1:].replace("_", " "), lines, metric))
    return panels


def more_panels(curves: Curves) -> list[Panel]:
    """Learning rate, gradient norm and throughput, where the journal has them."""
    panels = []
    for key, title, series, noisy in (
        ("rate", "Learning rate", curves.learning_rate, False),
        ("norm", "Gradient norm (before clipping)", curves.grad_norm, True),
        ("speed", "Real tokens per second", curves.tokens_per_second, True),
    ):
        lines = [PanelLine(title.lower(), "raw" if noisy else "smooth", "train", series)]
        if noisy:
            lines.append(PanelLine("smoothed", "smooth", "train", series.smoothed()))
        panels.append(Panel(key, title, tuple(lines)))
    return [panel for panel in panels if not panel.is_empty]
