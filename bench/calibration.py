"""Measure how well the temperature of fold models calibrates the model trained on all examples.

    .venv/bin/python bench/calibration.py docs/research/measurements/fold_logits_h200.npz             # development tasks
    .venv/bin/python bench/calibration.py docs/research/measurements/fold_logits_held_out_h200.npz

For each cell (model-task-rows-seed), the file contains the held-out logits of three fold models (`held`, `gold`, `fold`) and the
test logits of a model trained on all examples (`test`, `test_gold`). The last line of the table is the error by chance: labels
are drawn from the probabilities, which are then right.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from tunesmith.inference.tables import probabilities_of
from tunesmith.labels import Task
from tunesmith.metrics.calibration import expected_calibration_error, fit_temperature, log_loss_of

Cell = dict[str, npt.NDArray[np.float64]]
DRAWS = 20


def errors_of(cell: Cell) -> dict[str, tuple[float, float]]:
    """Return calibration error and log loss on the test examples, by rule."""
    gold, held = cell["test_gold"].astype(np.int64), cell["gold"].astype(np.int64)
    fitted = fit_temperature(cell["held"], held, Task.MULTICLASS)
    heat, divided = (1.0, 1.0) if fitted is None else (fitted.value, fitted.value / 1.5**0.5)
    rules = {"As trained": 1.0, "Temperature of the folds": heat}
    rules |= {"Divided by 1.22 if above 1": divided if heat > 1 else heat, "Divided by 1.22": divided}
    table = {}
    for rule, value in rules.items():
        probabilities = probabilities_of(cell["test"] / value, Task.MULTICLASS)
        error = expected_calibration_error(probabilities, gold)
        table[rule] = (error or 0.0, log_loss_of(cell["test"] / value, gold))
    rng = np.random.default_rng(0)
    drawn = [[rng.choice(len(row), p=row / row.sum()) for row in probabilities] for _ in range(DRAWS)]
    chance = np.mean([expected_calibration_error(probabilities, labels) or 0.0 for labels in drawn])
    table["By chance"] = (float(chance), np.nan)
    return table


def main() -> None:
    """Print means over cells, by the number of examples."""
    with np.load(sys.argv[1]) as stored:
        names = sorted({key.rsplit("-", 1)[0] for key in stored})
        parts = ("held", "gold", "fold", "test", "test_gold")
        cells = {name: {part: stored[f"{name}-{part}"].astype(np.float64) for part in parts} for name in names}
    found = {name: errors_of(cell) for name, cell in cells.items()}
    sizes = sorted({int(name.rsplit("-", 2)[1]) for name in names})
    print(f"{len(cells)} cells\n\n| Probabilities | {' | '.join(f'{n:,} examples' for n in sizes)} | Log loss |")
    print("|---" * (len(sizes) + 2) + "|")
    for rule in next(iter(found.values())):
        errors = [np.mean([t[rule][0] for n, t in found.items() if int(n.rsplit("-", 2)[1]) == size]) for size in sizes]
        loss = np.mean([table[rule][1] for table in found.values()])
        shown = "" if np.isnan(loss) else f"{loss:.3f}"
        print(f"| {rule} | {' | '.join(f'{e:.3f}' for e in errors)} | {shown} |")


if __name__ == "__main__":
    main()
