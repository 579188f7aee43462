"""Measure how well the temperature of fold models calibrates the model trained on all examples, for several divisors.

    .venv/bin/python bench/calibration.py docs/research/measurements/fold_logits_h200.npz

For each cell (model-task-rows-seed), the file contains the held-out logits of three fold models (`held`, `gold`, `fold`) and the
test logits of a model trained on all examples (`test`, `test_gold`).
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from tunesmith.inference.tables import probabilities_of
from tunesmith.labels import Task
from tunesmith.metrics.calibration import expected_calibration_error, fit_temperature, log_loss_of

Cell = dict[str, npt.NDArray[np.float64]]
DIVISORS = (1.0, 1.1, 1.2, 1.5**0.5, 1.3, 1.4)
"""`--recipe best` uses the root of 1.5: all examples are 1.5 times those of a fold model."""


def errors_of(cell: Cell) -> dict[str, tuple[float, float]]:
    """Return calibration error and log loss on the test examples, by rule."""
    gold, held = cell["test_gold"].astype(np.int64), cell["gold"].astype(np.int64)
    heats = {"as trained": 1.0}
    for name, some in (("three folds", cell["fold"] >= 0), ("one fold", cell["fold"] == 0)):
        heat = fit_temperature(cell["held"][some], held[some], Task.MULTICLASS)
        for divisor in DIVISORS:
            heats[f"{name}, divided by {divisor:.2f}"] = 1.0 if heat is None else heat.value / divisor
    table = {}
    for rule, value in heats.items():
        logits = cell["test"] / value
        error = expected_calibration_error(probabilities_of(logits, Task.MULTICLASS), gold)
        table[rule] = (error or 0.0, log_loss_of(logits, gold))
    return table


def main() -> None:
    """Print means over cells, by the number of examples."""
    with np.load(sys.argv[1]) as stored:
        names = sorted({key.rsplit("-", 1)[0] for key in stored})
        parts = ("held", "gold", "fold", "test", "test_gold")
        cells = {name: {part: stored[f"{name}-{part}"].astype(np.float64) for part in parts} for name in names}
    found = {name: errors_of(cell) for name, cell in cells.items()}
    sizes = sorted({int(name.rsplit("-", 2)[1]) for name in names})
    print(f"{len(cells)} cells\n\n| | {' | '.join(f'{n:,} rows' for n in sizes)} | log loss |")
    print("|---" * (len(sizes) + 2) + "|")
    for rule in next(iter(found.values())):
        errors = [np.mean([t[rule][0] for n, t in found.items() if int(n.rsplit("-", 2)[1]) == size]) for size in sizes]
        loss = np.mean([table[rule][1] for table in found.values()])
        print(f"| {rule} | {' | '.join(f'{e:.3f}' for e in errors)} | {loss:.3f} |")


if __name__ == "__main__":
    main()
