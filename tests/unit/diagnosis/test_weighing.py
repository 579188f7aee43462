"""The verdict model is fitted to the stored features, and impossible verdicts have no probability."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tunesmith.diagnosis.reading import Features, read_curves, read_features
from tunesmith.diagnosis.verdict import CODES, MODEL_FILE, columns_of, is_possible, weigh_verdicts
from tunesmith.runs.event_log import curves_from_events

ROOT = Path(__file__).parents[3]


@pytest.fixture
def features(synthetic: SimpleNamespace) -> Features:
    run = synthetic.make_run([0.48, 0.32, 0.22], [0.44, 0.38, 0.39], accuracy=[0.79, 0.84, 0.85])
    return read_features(read_curves(curves_from_events(run), synthetic.CONFIG, label_counts={"a": 2474, "b": 1194}))


def test_probabilities_are_of_known_verdicts_and_sum_to_one(features: Features) -> None:
    likely = weigh_verdicts(features)
    assert set(likely) <= set(CODES)
    assert sum(likely.values()) == pytest.approx(1)
    assert list(likely.values()) == sorted(likely.values(), reverse=True)
    assert next(iter(likely)) == "healthy"


def test_excluded_verdict_has_no_probability(features: Features) -> None:
    assert [is_possible(code, features) for code in ("healthy", "no_signal", "class_ignored")] == [True, False, False]
    likely = weigh_verdicts(features)
    assert likely["no_signal"] == likely["class_ignored"] == 0


def test_packaged_model_is_fitted_to_the_stored_features() -> None:
    """Its loss on the table is at the minimum; a different table, feature or penalty would have a nonzero gradient."""
    fit = SimpleNamespace(**runpy.run_path(str(ROOT / "bench" / "diagnose_fit.py")))
    stored = json.loads(MODEL_FILE.read_text())
    model = {k: np.array(v) for k, v in stored.items() if k not in ("features", "verdicts", "penalty")}
    table = fit.Table()
    assert (stored["features"], tuple(stored["verdicts"])) == (table.names, fit.VERDICTS)
    scales = fit.scales(table.values[table.fits])
    assert all(np.allclose(model[name], values) for name, values in scales.items())
    coefficients = model["coefficients"].copy()
    coefficients[-1, 0] -= math.log(fit.HEALTHY_TIMES)
    columns = columns_of(table.values[table.fits], model)
    slopes = [
        float(np.abs(fit.loss_of(point, columns, table, table.fits, stored["penalty"])[1]).max())
        for point in (coefficients, 0.8 * coefficients)
    ]
    assert slopes[0] < 1e-3 < slopes[1]
