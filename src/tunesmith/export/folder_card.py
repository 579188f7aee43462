"""The card of an exported folder: the model's own card, and what was measured of the export."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tunesmith.export.checked import table_of
from tunesmith.predict.facts import GraphFacts, ModelFacts

if TYPE_CHECKING:
    from tunesmith.export.exporting import Exported


def export_card(
    model_card: str, done: Exported, to: str, threads: int, facts: ModelFacts, graph: GraphFacts | None
) -> str:
    """Markdown; the model's card stays on top with its metadata."""
    columns = facts.text_columns or ("text",)
    pair = ', pairs=["..."]' if len(columns) == 2 else ""
    if graph is not None:  # transformers cannot load a graph
        library = graph.engine.removesuffix("runtime")
        model_card = re.sub(r"(?m)^library_name: .*$", f"library_name: {library}", model_card, count=1)
        model_card = model_card.partition("## Use\n")[0]
    speed = [f"| {name} | {value:,.0f} |" for name, value in done.speed.items()]
    lines = [
        model_card.rstrip() or f"# {to} export",
        "",
        f"## Export: {to}",
        "",
        f"Measured on {done.checked.rows:,} {done.checked.split} rows against the original before this folder was written.",
        "Candidates are tried in this order, and the first that is accepted is here. Differences are of the export to the",
        "original, with a 95% interval of a paired test.",
        "",
        table_of(done.tried),
        "",
        f"Size: {done.bytes / 1e6:,.1f} MB (original {done.original_bytes / 1e6:,.1f} MB).",
        "",
        f"Rows a second from text on the CPU, {threads} thread(s) each, best of 3 alternating turns:",
        "",
        "| | rows/s |",
        "|---|---|",
        *speed,
        "",
        "## Use",
        "",
        *([] if graph is None else [graph.installing, ""]),
        "```python",
        "from tunesmith import Predictor",
        "",
        f'Predictor.load("{done.folder.name}").predict(["..."]{pair})',
        "```",
        "",
    ]
    return "\n".join(lines)
