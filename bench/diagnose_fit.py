"""Fit the probabilities of verdicts to the features of recorded runs: src/tunesmith/diagnosis/verdicts.json.

    python bench/diagnose_fit.py --output docs/research/measurements/diagnosis.json  # held-out sources: half a minute
    python bench/diagnose_fit.py --nested   # choose the penalty for each held-out source: seven minutes
    python bench/diagnose_fit.py --write    # also write the model of all runs

Multinomial logistic regression on partial labels: if several verdicts are right, their summed probability is maximized. Synthetic
curves are added, because few real runs oscillate or diverge. See docs/research/diagnosis.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from common import write_record  # noqa: E402
from tunesmith.diagnosis.reading import Features, Reading, read_curves, read_features  # noqa: E402
from tunesmith.diagnosis.verdict import (  # noqa: E402
    LOGARITHMIC,
    MODEL_FILE,
    SIGNAL,
    certain_verdict,
    columns_of,
    feature_values,
    is_possible,
)
from tunesmith.events import Evaluated, Event, Improved, RunEnded, RunStarted, StepDone  # noqa: E402
from tunesmith.runs.event_log import Curves, curves_from_events  # noqa: E402

DRAWN = 25
CLASSES = ((50, 50), (67, 33), (40, 35, 25), (30, 20, 20, 15, 10, 5), (5,) * 20)


@dataclass
class Case:
    """One synthetic run with a value per epoch; losses are relative to the constant baseline's.

    `hold`: after its minimum, the score doesn't follow the loss.
    """

    right: tuple[str, ...]
    train: list[float]
    validation: list[float]
    scores: list[float] | None = None
    """From the constant baseline's (0) to a perfect one (1); None: follows the validation loss."""
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    noise: float = 0.0
    rows: int = 0


def _line(pick: random.Random, start: float, end: float, count: int) -> list[float]:
    """Return noisy values from start to end that change fast at first."""
    return [end + (start - end) * 0.35**k * pick.uniform(0.95, 1.05) for k in range(count - 1)] + [end]


def _cases(pick: random.Random) -> Iterator[Case]:
    """Return a synthetic run of each kind."""
    u, count = pick.uniform, pick.randint(3, 7)
    best = u(0.25, 0.75)
    fall, known = _line(pick, u(0.75, 0.95), best, count), _line(pick, u(0.75, 0.95), best * u(0.4, 1), count)
    yield Case(("healthy",), known, fall)
    yield Case(("healthy",), [*known[:-1], 0.9 * known[-1]], [*fall[:-1], best * u(1.0, 1.1)])
    last = {"load_best_model_at_end": False}
    low, heart = u(0.5, 0.8), _line(pick, u(0.6, 0.9), u(0.02, 0.3), count + 1)
    risen = [low * (1.15 if count > 3 else 1), *(low * (1 + k * u(0.22, 0.3)) for k in range(count))]
    held = [0.9 * (1 - low) * u(0.95, 1.05) for _ in risen]
    heart = heart[: len(risen)]
    yield Case(("overfitting",), heart, risen, held, last)
    yield Case(("overfitting",), heart, risen, [v - 0.02 * k for k, v in enumerate(held)], last)
    fallen = [low * (1 + 0.1 * k) for k in range(len(heart))]
    yield Case(("overfitting",), heart, fallen, [v - 0.06 * k for k, v in enumerate(held)], last)
    yield Case(("healthy",), heart, risen, held)
    at_chance = [u(-0.02, 0.02) for _ in range(9)]
    near = [u(0.99, 1.03) for _ in range(count)]
    yield Case(("overfitting",), _line(pick, 0.8, u(0.02, 0.1), count), near, at_chance, rows=pick.randint(50, 200))
    slow = [u(0.96, 1.02) - 0.01 * k for k in range(count)]
    yield Case(("underfitting",), slow, slow, at_chance, {"learning_rate": 10 ** u(-7, -5.5)})
    some = [v - 0.05 for v in slow]
    yield Case(("underfitting",), some, [v + 0.01 for v in some], None, {"freeze": ["encoder"]})
    yield Case(("underfitting", "stopped_too_early"), some, slow, at_chance, steps=pick.randint(4, 9), rows=100)
    for step in (u(0.1, 0.13), u(0.12, 0.15), u(0.13, 0.17)):  # no slower at the end
        gone = [u(0.92, 0.98) - k * step for k in range(pick.randint(3, 4))]
        share = u(0.7, 1.3)
        yield Case(
            ("stopped_too_early",), [v - 0.03 * k for k, v in enumerate(gone)], gone, [(1 - v) ** share for v in gone]
        )
    little = [u(0.94, 0.97) for _ in range(count)]  # a hard task: the loss is slightly below the constant baseline's
    yield Case(("underfitting",), _line(pick, 0.92, u(0.75, 0.86), count), little, [v + 0.03 for v in at_chance])
    jumps = [best * (u(1.5, 2.2) if k % 2 else u(0.95, 1.1)) for k in range(pick.randint(5, 9))]
    down = _line(pick, 0.8, best * 0.8, len(jumps))
    yield Case(("erratic",), down, jumps)
    single = {"per_device_train_batch_size": 1}
    yield Case(("erratic",), known, [v * u(1, 1.1) for v in fall], None, single, noise=u(0.9, 1.5))
    high = {"learning_rate": 10 ** u(-3.1, -2)}
    yield Case(("diverged",), near, near, at_chance, high)
    hardly = [u(0.98, 1.02), u(0.93, 0.97), u(0.9, 0.95)]
    yield Case(("diverged", "erratic"), hardly, hardly, None, high)
    rising = [1.0 + 0.01 * k * u(0, 2) for k in range(count)]
    yield Case(("no_signal",), [1 - 0.05 * k * u(0, 1) for k in range(count)], rising, at_chance)
    yield Case(("no_signal",), _line(pick, 1.0, u(0.75, 0.95), count), [v + 0.02 for v in rising], at_chance)
    worse = [1.0 + 0.4 * k * u(0.6, 1.4) for k in range(count)]
    yield Case(("no_signal",), _line(pick, 0.98, u(0.1, 0.6), count), worse, [v - 0.05 for v in at_chance])
    turned = [u(1.3, 2.0) + 0.3 * k for k in range(count)]
    yield Case(("split_mismatch",), known, turned, [u(-0.5, -0.2) - 0.02 * k for k in range(count)])


def _curves(case: Case, pick: random.Random, shares: tuple[int, ...], rate: float) -> Curves:
    chance = -sum(s / 100 * math.log(s / 100) for s in shares)
    steps, held_out = case.steps or pick.randint(40, 150), pick.choice((200, 400, 800))
    total, noise = steps * len(case.train), case.noise or pick.uniform(0.1, 0.3)
    events: list[Event] = [
        RunStarted("run", 0, total, float(steps), len(case.train), case.rows or pick.randint(800, 4000), 0.0)
    ]
    most, best = max(shares) / 100, -math.inf
    for epoch, end in enumerate(case.train):
        begin = case.train[epoch - 1] if epoch else max(1.02, end)
        for k in range(1, steps + 1):
            step, mean = epoch * steps + k, begin + (end - begin) * k / steps
            loss = chance * max(1e-4, mean * (1 + noise * pick.gauss(0, 1)))
            events.append(StepDone(step, step / steps, loss, 2.0, rate * (1 - step / total), 16, 850, 880, 0.05))
        step, done = (epoch + 1) * steps, epoch + 1.0
        gains = [max(0.0, 1 - end) ** 0.7, max(0.0, 1 - case.validation[epoch]) ** 0.7]
        gains[1] = gains[1] if case.scores is None else case.scores[epoch]
        for split, share, gain, n in zip(
            ("train_sample", "validation"), (end, case.validation[epoch]), gains, (192, held_out), strict=True
        ):
            score = min(1.0, max(0.0, most + (1 - most) * gain if gain > 0 else most * (1 + gain)))
            events.append(Evaluated(step, done, split, {"loss": share * chance, "accuracy": score}, n, 0.5))
        if score > best:
            best = score
            events.append(Improved(step, "accuracy", score))
    return curves_from_events([*events, RunEnded(total, "completed", 1.0)])


def textbook_runs() -> Iterator[tuple[tuple[str, ...], Reading]]:
    """Return right verdicts and curves of all synthetic runs; seeded."""
    pick = random.Random(7)
    for _ in range(DRAWN):
        for case in _cases(pick):
            shares, usual = pick.choice(CLASSES), 10 ** pick.uniform(-4.8, -4)
            options = {"learning_rate": usual, "per_device_train_batch_size": 16, **case.options}
            curves = _curves(case, pick, shares, float(options["learning_rate"]))
            counts = {str(k): 10 * share for k, share in enumerate(shares)}
            yield case.right, read_curves(curves, options, label_counts=counts)


TABLE = ROOT / "docs/research/measurements/diagnose_signs.json.gz"
VERDICTS = (
    *("healthy", "overfitting", "calibration_drift", "underfitting", "erratic", "diverged", "stopped_too_early"),
    *("no_signal", "label_noise", "split_mismatch", "class_ignored"),
)
PENALTY, PENALTIES = 0.002, (0.001, 0.002, 0.005)
HEALTHY_TIMES = 2.0
"""Factor for the odds of `healthy`, because users' runs are healthy more often than the recorded runs (42%). Chosen so that at
most about 2% of the well-made runs of a held-out source get an alarm."""
WEIGHTS = {"whole": 1.0, "textbook": 0.5}
"""Weights of entries: 1, or 0.2 if evidence was removed."""
Floats = NDArray[np.float64]


class Table:
    """Entries as arrays."""

    def __init__(self, path: Path = TABLE) -> None:
        found = json.loads(gzip.decompress(path.read_bytes()))
        self.names = [part.name for part in fields(Features)]
        self.runs: list[dict[str, Any]] = found["runs"] + textbook_entries(found["signs"])
        every = np.array([run["signs"] for run in self.runs], np.float64)
        self.values = every[:, [found["signs"].index(name) for name in self.names]]
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
    """Return the entries of synthetic curves, which count as a separate source."""
    found = []
    for number, (right, reading) in enumerate(textbook_runs()):
        features = read_features(reading)
        values = feature_values(features.named(), names)
        entry = {"key": ("none", "textbook", right[0], number), "source": "textbook", "variant": "textbook"}
        impossible = [code for code in VERDICTS if not is_possible(code, features)]
        found.append(
            {**entry, "right": right, "well": False, "said": None, "not": impossible, "signs": values.tolist()}
        )
    return found


def scales(values: Floats) -> dict[str, Any]:
    """Return a feature's clipping limits, mean, standard deviation and median."""
    low, high = np.nanquantile(values, 0.02, axis=0), np.nanquantile(values, 0.98, axis=0)
    inside = np.clip(values, low, high)
    found = {"low": low, "high": high, "mean": np.nanmean(inside, axis=0), "spread": np.nanstd(inside, axis=0) + 1e-3}
    return {name: _rounded(v) for name, v in (found | {"median": np.nanmedian(inside, axis=0)}).items()}


def _rounded(values: Floats, digits: int = 4) -> Floats:
    return np.array([float(f"{v:.{digits}g}") for v in values.ravel()]).reshape(values.shape)


def likely(columns: Floats, coefficients: Floats, possible: NDArray[np.bool_]) -> Floats:
    """Return the probabilities of the verdicts by row."""
    logits = np.where(possible, columns @ coefficients, -1e9)
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def loss_of(
    coefficients: Floats, columns: Floats, table: Table, at: NDArray[np.bool_], penalty: float
) -> tuple[float, Floats]:
    """Return the mean loss with the penalty, and its gradient."""
    right, weight = table.right[at], table.weight[at] / table.weight[at].sum()
    p = likely(columns, coefficients, table.possible[at])
    hit = (p * right).sum(axis=1) + 1e-12
    punished = coefficients * (np.arange(len(coefficients)) < len(coefficients) - 1)[:, None]
    gradient = columns.T @ ((p - p * right / hit[:, None]) * weight[:, None]) + penalty * punished
    return float(-(weight * np.log(hit)).sum() + 0.5 * penalty * (punished**2).sum()), gradient


def fit(table: Table, at: NDArray[np.bool_], penalty: float) -> dict[str, Any]:
    """Return a model fitted to these entries."""
    model = scales(table.values[at])
    columns = columns_of(table.values[at], model)
    shape = columns.shape[1], len(VERDICTS)

    def flat(point: Floats) -> tuple[float, Floats]:
        loss, gradient = loss_of(point.reshape(shape), columns, table, at, penalty)
        return loss, gradient.ravel()

    found = minimize(flat, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 400})
    return model | {"coefficients": found.x.reshape(shape)}


def ask(model: dict[str, Any], table: Table, at: NDArray[np.bool_]) -> Floats:
    """Return the probabilities for these entries, without the factor for `healthy`."""
    return likely(columns_of(table.values[at], model), model["coefficients"], table.possible[at])


def choose_penalty(table: Table, at: NDArray[np.bool_]) -> float:
    """Return the penalty with the lowest loss on held-out sources (five folds)."""
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
    """Return the probabilities of every entry from a model that has not seen its group, and the penalties."""
    found, used = np.zeros(table.right.shape), []
    for group in sorted(set(groups)):
        at = table.fits & (groups != group)
        used.append(choose_penalty(table, at) if penalty is None else penalty)
        found[groups == group] = ask(fit(table, at, used[-1]), table, groups == group)
    return found, used


def verdicts(table: Table, p: Floats, times: float = HEALTHY_TIMES, *, rules: bool = True) -> list[str]:
    """Return the first verdict of every entry, as tunesmith reports it, but without label noise estimates."""
    changed = p * np.array([times if code == "healthy" else 1.0 for code in VERDICTS])
    found = []
    for run, values, place in zip(table.runs, table.values, changed.argmax(axis=1), strict=True):
        code = VERDICTS[int(place)]
        named = dict(zip(table.names, values.tolist(), strict=True))
        features = Features(**named | {name: 10 ** named[name] for name in LOGARITHMIC})
        found.append(run["said"] or (rules and certain_verdict(code, features)) or code)
    return found


MILD = ("overfitting", "calibration_drift")
ONE = ("no_signal", "label_noise")


def count_right(table: Table, said: list[str], at: Iterable[int]) -> dict[str, int]:
    """Count correct verdicts and false alarms on well-made runs; `joined` doesn't distinguish `no_signal` and `label_noise`."""
    keeps = table.values[:, table.names.index("keeps")]
    found = Counter[str](runs=0, right=0, joined=0, well=0, alarms=0)
    for k in at:
        run = table.runs[k]
        hit = said[k] in run["right"]
        found["runs"] += 1
        found["right"] += hit
        found["joined"] += hit or (said[k] in ONE and bool(set(ONE) & set(run["right"])) and "healthy" in run["not"])
        if run["well"]:
            mild = said[k] in MILD and keeps[k]  # reported as a note
            found["well"] += 1
            found["alarms"] += said[k] != "healthy" and not mild
    return dict(found)


def describe(table: Table, said: list[str], at: Iterable[int]) -> str:
    """Return the counts as a line."""
    found = count_right(table, said, at)
    runs, well = max(1, found["runs"]), max(1, found["well"])
    return (
        f"right {found['right']}/{found['runs']} ({found['right'] / runs:.1%}), joined {found['joined'] / runs:.1%}, "
        f"alarms {found['alarms']}/{found['well']} ({found['alarms'] / well:.1%})"
    )


def _places(table: Table, variant: str = "whole", **values: str) -> list[int]:
    wanted = [k for k, run in enumerate(table.runs) if run["variant"] == variant]
    return [k for k in wanted if all(getattr(table, name)[k] == value for name, value in values.items())]


def main() -> None:
    """Print the verdicts of models on held-out sources and encoders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nested", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    table = Table()
    if args.write:
        write_model(fit(table, table.fits, PENALTY), table.names, PENALTY)
    by_source, used = left_out(table, table.source, None if args.nested else PENALTY)
    print(f"each of {len(used)} sources held out, penalties {dict(Counter(used))}")
    for times in (1.0, 1.5, 2.0, 3.0, 4.0):
        print(f"  healthy x {times:g}: {describe(table, verdicts(table, by_source, times), _places(table))}")
    said = verdicts(table, by_source, rules=False)
    print(f"  without rules: {describe(table, said, _places(table))}")
    results = [{"runs_used": "whole", "rules": False, **count_right(table, said, _places(table))}]
    said = verdicts(table, by_source)
    for variant in ("whole", "few", "plain"):
        results.append({"runs_used": variant, "rules": True, **count_right(table, said, _places(table, variant))})
    write_record(args.output, device="cpu", results=results, note="Each data source is held out once.")
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
        print(
            f"  trained on the other encoders, tested on {model}: {describe(table, said, _places(table, model=model))}"
        )


def _print_shares(table: Table, p: Floats, said: list[str]) -> None:
    """Print how often verdicts with similar probabilities are right."""
    changed = p * np.array([HEALTHY_TIMES if code == "healthy" else 1.0 for code in VERDICTS])
    sure = (changed / changed.sum(axis=1, keepdims=True)).max(axis=1)
    for low, high in ((0.0, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.01)):
        some = [k for k in _places(table) if table.runs[k]["said"] is None and low <= sure[k] < high]
        right = sum(said[k] in table.runs[k]["right"] for k in some)
        print(f"  probability {low:g} to {min(high, 1):g}: right {right} of {len(some)}")


def write_model(model: dict[str, Any], names: list[str], penalty: float) -> None:
    """Write the model file of tunesmith; the factor for `healthy` is part of the intercept."""
    model["coefficients"][-1, 0] += math.log(HEALTHY_TIMES)
    model["coefficients"] = _rounded(model["coefficients"], 3)
    lists = {name: values.tolist() for name, values in model.items()}
    lines = [
        f'"{k}": {json.dumps(v)}'
        for k, v in ({"penalty": penalty, "features": names, "verdicts": VERDICTS} | lists).items()
    ]
    MODEL_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{MODEL_FILE.name}: {MODEL_FILE.stat().st_size:,} bytes, penalty {penalty:g}")


if __name__ == "__main__":
    main()
