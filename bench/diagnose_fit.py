"""Fits the probabilities of verdicts to the table of bench/diagnose_signs.py: src/tunesmith/diagnose/verdicts.json.

    python bench/diagnose_fit.py            # each source left out once, each family of encoders left out once: half a minute
    python bench/diagnose_fit.py --nested   # the penalty chosen anew for each source that is left out: seven minutes
    python bench/diagnose_fit.py --write    # and the model of all runs

Multinomial logistic regression on partial labels: where several verdicts are right, their summed probability is maximised.
See docs/research/diagnosis.md.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from diagnose_textbook import textbook_runs  # noqa: E402
from tunesmith.diagnosis.features import (  # noqa: E402
    SIGNAL,
    read_features,
)
from tunesmith.diagnosis.verdict import MODEL_FILE, columns_of_signs, is_possible, sign_values  # noqa: E402

TABLE = ROOT / "docs/research/measurements/diagnose_signs.json.gz"
VERDICTS = (
    *("healthy", "overfitting", "calibration_drift", "underfitting", "erratic", "diverged", "stopped_too_early"),
    *("no_signal", "label_noise", "split_mismatch", "class_ignored"),
)
PENALTY, PENALTIES = 0.002, (0.001, 0.002, 0.005)
HEALTHY_TIMES = 3.0
"""So many times as often as in the bank, where 42 runs in 100 are well made, is a run healthy in use: the odds of `healthy` are
multiplied by it. Chosen so that alarms on well-made runs of a source that was left out are at most about 3%."""
WEIGHTS = {"whole": 1.0, "textbook": 0.5}
"""Of an entry; one with less evidence than the run had has 0.2."""
Floats = NDArray[np.float64]


class Table:
    """The entries as arrays."""

    def __init__(self, path: Path = TABLE) -> None:
        found = json.loads(gzip.decompress(path.read_bytes()))
        self.names: list[str] = found["signs"]
        self.runs: list[dict[str, Any]] = found["runs"] + textbook_entries(self.names)
        self.values = np.array([run["signs"] for run in self.runs], np.float64)
        self.right = np.array([[code in run["right"] for code in VERDICTS] for run in self.runs])
        self.possible = np.array([[code not in run["not"] for code in VERDICTS] for run in self.runs])
        signal = self.values[:, self.names.index("signal")]
        self.possible[:, VERDICTS.index("no_signal")] = ~(signal > SIGNAL)
        self.weight = np.array([WEIGHTS.get(run["variant"], 0.2) for run in self.runs])
        self.source = np.array([run["source"] for run in self.runs])
        self.model = np.array([run["key"][0] for run in self.runs])
        asked = np.array([run["said"] is None for run in self.runs])
        self.fits = asked & (self.right & self.possible).any(axis=1)


def textbook_entries(names: list[str]) -> list[dict[str, Any]]:
    """Entries of drawn curves: a source of their own."""
    found = []
    for number, (right, reading) in enumerate(textbook_runs()):
        features = read_features(reading)
        values = sign_values(features.named(), names)
        entry = {"key": ("none", "textbook", right[0], number), "source": "textbook", "variant": "textbook"}
        impossible = [code for code in VERDICTS if not is_possible(code, features)]
        found.append(
            {**entry, "right": right, "well": False, "said": None, "not": impossible, "signs": values.tolist()}
        )
    return found


def scales(values: Floats) -> dict[str, Any]:
    """What a sign is cut at, and its mean, spread and median."""
    low, high = np.nanquantile(values, 0.02, axis=0), np.nanquantile(values, 0.98, axis=0)
    inside = np.clip(values, low, high)
    found = {"low": low, "high": high, "mean": np.nanmean(inside, axis=0), "spread": np.nanstd(inside, axis=0) + 1e-3}
    return {name: _rounded(v) for name, v in (found | {"median": np.nanmedian(inside, axis=0)}).items()}


def _rounded(values: Floats, digits: int = 4) -> Floats:
    return np.array([float(f"{v:.{digits}g}") for v in values.ravel()]).reshape(values.shape)


def likely(columns: Floats, coefficients: Floats, possible: NDArray[np.bool_]) -> Floats:
    """Probabilities of the verdicts by row."""
    logits = np.where(possible, columns @ coefficients, -1e9)
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def loss_of(
    coefficients: Floats, columns: Floats, table: Table, at: NDArray[np.bool_], penalty: float
) -> tuple[float, Floats]:
    """(mean loss with the penalty, its gradient)."""
    right, weight = table.right[at], table.weight[at] / table.weight[at].sum()
    p = likely(columns, coefficients, table.possible[at])
    hit = (p * right).sum(axis=1) + 1e-12
    punished = coefficients * (np.arange(len(coefficients)) < len(coefficients) - 1)[:, None]
    gradient = columns.T @ ((p - p * right / hit[:, None]) * weight[:, None]) + penalty * punished
    return float(-(weight * np.log(hit)).sum() + 0.5 * penalty * (punished**2).sum()), gradient


def fit(table: Table, at: NDArray[np.bool_], penalty: float) -> dict[str, Any]:
    """The model of these entries."""
    model = scales(table.values[at])
    columns = columns_of_signs(table.values[at], model)
    shape = columns.shape[1], len(VERDICTS)

    def flat(point: Floats) -> tuple[float, Floats]:
        loss, gradient = loss_of(point.reshape(shape), columns, table, at, penalty)
        return loss, gradient.ravel()

    found = minimize(flat, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 400})
    return model | {"coefficients": found.x.reshape(shape)}


def ask(model: dict[str, Any], table: Table, at: NDArray[np.bool_]) -> Floats:
    """Probabilities for these entries, before the odds of `healthy` are changed."""
    return likely(columns_of_signs(table.values[at], model), model["coefficients"], table.possible[at])


def choose_penalty(table: Table, at: NDArray[np.bool_]) -> float:
    """The one with the lowest loss on sources that were left out, in five parts."""
    parts = {source: k % 5 for k, source in enumerate(sorted(set(table.source[at])))}
    part = np.array([parts.get(source, -1) for source in table.source])
    whole = np.array([run["variant"] == "whole" for run in table.runs])

    def loss(penalty: float) -> float:
        total = 0.0
        for k in range(5):
            asked = at & (part == k) & whole
            p = ask(fit(table, at & (part != k), penalty), table, asked)
            total -= float(np.log((p * table.right[asked]).sum(axis=1) + 1e-6).sum())
        return total

    return min(PENALTIES, key=loss)


def left_out(table: Table, groups: NDArray[Any], penalty: float | None = None) -> tuple[Floats, list[float]]:
    """(probabilities of every entry by a model that has not seen its group, the penalties)."""
    found, used = np.zeros(table.right.shape), []
    for group in sorted(set(groups)):
        at = table.fits & (groups != group)
        used.append(choose_penalty(table, at) if penalty is None else penalty)
        found[groups == group] = ask(fit(table, at, used[-1]), table, groups == group)
    return found, used


def verdicts(table: Table, p: Floats, times: float = HEALTHY_TIMES) -> list[str]:
    """The first verdict of every entry, as the product says it."""
    changed = p * np.array([times if code == "healthy" else 1.0 for code in VERDICTS])
    found = [VERDICTS[int(k)] for k in changed.argmax(axis=1)]
    return [run["said"] or code for run, code in zip(table.runs, found, strict=True)]


MILD = ("overfitting", "calibration_drift")
ONE = ("no_signal", "label_noise")


def describe(table: Table, said: list[str], at: Iterable[int]) -> str:
    """Right, right where `no_signal` and `label_noise` of a run at chance are one, and alarms on well-made runs."""
    keeps, rise = table.names.index("keeps"), table.names.index("kept_rise")
    right = joined = alarms = well = count = 0
    for k in at:
        run, count = table.runs[k], count + 1
        hit = said[k] in run["right"]
        right += hit
        joined += hit or (said[k] in ONE and bool(set(ONE) & set(run["right"])) and "healthy" in run["not"])
        if run["well"]:
            mild = said[k] in MILD and run["signs"][keeps] and (run["signs"][rise] or 0) < 0.4
            well, alarms = well + 1, alarms + (said[k] != "healthy" and not mild)
    shares = [part / max(1, whole) for part, whole in ((right, count), (joined, count), (alarms, well))]
    return f"right {right}/{count} ({shares[0]:.1%}), joined {shares[1]:.1%}, alarms {alarms}/{well} ({shares[2]:.1%})"


def _places(table: Table, variant: str = "whole", **values: str) -> list[int]:
    wanted = [k for k, run in enumerate(table.runs) if run["variant"] == variant]
    return [k for k in wanted if all(getattr(table, name)[k] == value for name, value in values.items())]


def main() -> None:
    """Prints what models that have not seen a source, or an encoder, say of it."""
    table = Table()
    if "--write" in sys.argv[1:]:
        write_model(fit(table, table.fits, PENALTY), table.names, PENALTY)
    by_source, used = left_out(table, table.source, None if "--nested" in sys.argv[1:] else PENALTY)
    print(f"each of {len(used)} sources left out, penalties {dict(Counter(used))}")
    for times in (1.0, 1.5, 2.0, 3.0, 4.0):
        print(f"  healthy x {times:g}: {describe(table, verdicts(table, by_source, times), _places(table))}")
    said = verdicts(table, by_source)
    for variant in ("whole", "thin", "few", "plain", "textbook"):
        print(f"  {variant}: {describe(table, said, _places(table, variant))}")
    for source in sorted(set(table.source)):
        print(f"    {source}: {describe(table, said, _places(table, source=source))}")
    wrong = Counter((table.runs[k]["key"][2], said[k]) for k in _places(table) if said[k] not in table.runs[k]["right"])
    print("  wrong: " + "; ".join(f"{cause} -> {code} {n}" for (cause, code), n in wrong.most_common(40)))
    _print_shares(table, by_source, said)
    family = np.where(table.model == "L3", "L3", "granite")
    said = verdicts(table, left_out(table, family, PENALTY)[0])
    for model in ("L3", "G", "G3"):
        print(f"  the other encoder's runs, asked about {model}: {describe(table, said, _places(table, model=model))}")


def _print_shares(table: Table, p: Floats, said: list[str]) -> None:
    """How often verdicts with about the same probability are right."""
    changed = p * np.array([HEALTHY_TIMES if code == "healthy" else 1.0 for code in VERDICTS])
    sure = (changed / changed.sum(axis=1, keepdims=True)).max(axis=1)
    for low, high in ((0.0, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.01)):
        some = [k for k in _places(table) if table.runs[k]["said"] is None and low <= sure[k] < high]
        right = sum(said[k] in table.runs[k]["right"] for k in some)
        print(f"  probability {low:g} to {min(high, 1):g}: right {right} of {len(some)}")


def write_model(model: dict[str, Any], names: list[str], penalty: float) -> None:
    """The file that the product reads; the odds of `healthy` are in its intercept."""
    model["coefficients"][-1, 0] += math.log(HEALTHY_TIMES)
    model["coefficients"] = _rounded(model["coefficients"], 3)
    lists = {name: values.tolist() for name, values in model.items()}
    lines = [
        f'"{k}": {json.dumps(v)}'
        for k, v in ({"penalty": penalty, "signs": names, "verdicts": VERDICTS} | lists).items()
    ]
    MODEL_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{MODEL_FILE.name}: {MODEL_FILE.stat().st_size:,} bytes, penalty {penalty:g}")


if __name__ == "__main__":
    main()
