"""A fitted model beside the rules of the diagnosis: multinomial logistic regression over the same signs, each task left out once.

    python bench/diagnose_fit.py BANK...          # folders of bench/diagnose_runs.py; needs scikit-learn

A run that is not above the best constant is never healthy here either. The rules have seen some of these tasks, the fitted model
none of those it is asked about.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

from diagnose_causes import MADE_WELL  # noqa: E402
from diagnose_judge import Run, load_runs  # noqa: E402
from diagnose_sources import GROUPS  # noqa: E402
from tunesmith.diagnose.evidence import read_curves  # noqa: E402
from tunesmith.diagnose.features import Features, read_features  # noqa: E402
from tunesmith.diagnose.thresholds import ABOVE_CONSTANT  # noqa: E402

LARGEST = 8.0
LOGARITHMIC = ("work", "rate", "train_rows")


def numbers_of(features: Features) -> list[float]:
    """Each sign, cut at eight, and whether it is unknown."""
    found: list[float] = []
    for field in fields(features):
        value = float(getattr(features, field.name))
        known = not math.isnan(value)
        if field.name in LOGARITHMIC:
            value = math.log10(max(value, 1e-9))
        found += [min(max(value, -LARGEST), LARGEST) if known else 0.0, float(known)]
    return found


def main() -> None:
    """Prints how often both are right."""
    from sklearn.linear_model import LogisticRegression

    warnings.filterwarnings("ignore")
    pairs: list[tuple[Run, Features]] = []
    for folder in sys.argv[1:]:
        for run in load_runs(Path(folder), groups=GROUPS)[0]:
            reading = read_curves(run.curves, run.options)
            if len(reading) and reading.rows is not None:
                pairs.append((run, read_features(reading)))
    signs = np.array([numbers_of(features) for _, features in pairs])
    signs = (signs - signs.mean(axis=0)) / (signs.std(axis=0) + 1e-6)
    causes, tasks = (np.array([part(run) for run, _ in pairs]) for part in (lambda r: r.right[0], lambda r: r.key[1]))
    for strength in (0.1, 0.3, 1.0):
        said = [""] * len(pairs)
        for task in sorted(set(tasks)):
            model = LogisticRegression(C=strength, max_iter=2000).fit(signs[tasks != task], causes[tasks != task])
            for at in np.flatnonzero(tasks == task):
                likely = model.predict_proba(signs[at : at + 1])[0]
                likely[model.classes_ == "healthy"] *= pairs[at][1].above > ABOVE_CONSTANT
                said[at] = str(model.classes_[int(np.argmax(likely))])
        right = sum(code in run.right for code, (run, _) in zip(said, pairs, strict=True))
        well = [code for code, (run, _) in zip(said, pairs, strict=True) if run.key[2] in MADE_WELL and not run.harm]
        missed = sum(code != "healthy" for code in well)
        print(f"C {strength:g}: right {right} of {len(pairs)}, other than healthy {missed} of {len(well)} healthy runs")
    print(f"rules: right {sum(run.verdict in run.right for run, _ in pairs)} of {len(pairs)}")


if __name__ == "__main__":
    main()
