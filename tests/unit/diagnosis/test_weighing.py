"""The packaged model of verdicts is the one that bench/diagnose_fit.py fits to the stored features."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tunesmith.diagnosis.verdict import MODEL_FILE, columns_of

ROOT = Path(__file__).parents[3]


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
