"""Which model is deployed: the best single candidate, or the soup of some, with temperature and thresholds of held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith.errors import ConfigError
from tunesmith.events import Event
from tunesmith.labels import Task
from tunesmith.metrics.calibration import MovedThresholds, Temperature, fit_temperature, fit_thresholds
from tunesmith.metrics.intervals import Score
from tunesmith.metrics.paired import PairedResult
from tunesmith.metrics.table import make_suite
from tunesmith.models.pooling import last_linear
from tunesmith.pipeline.watch import RunEnding
from tunesmith.runs.folder import RunDir
from tunesmith.training.checkpoint import read_weights
from tunesmith.tuning.blending import (
    HeldOut,
    compare_held_out,
    greedy_weights,
    mix_answers,
    shown_worse,
)
from tunesmith.tuning.clock import TimeUp
from tunesmith.tuning.tries import FOLDS, Tries
from tunesmith.tuning.variants import Variant

log = logging.getLogger(__name__)
SPLIT = "out_of_fold"
"""The name under which the scores of held-out rows stand beside those of the test split."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """`single` is trained last, in the run folder; `soup` has the weight of each model that is averaged, none: no soup."""

    metric: str
    single: Variant
    held_out: dict[str, dict[str, Score]]
    """Scores of held-out rows: of each member, of the ensemble, of the soup."""
    ensemble: dict[str, float]
    final: dict[str, Score]
    """Scores of held-out rows of what is deployed."""
    soup: dict[str, float] = field(default_factory=dict)
    models: dict[str, Path] = field(default_factory=dict)
    """The models of all rows of the soup's other members."""
    soup_test: PairedResult | None = None
    gain: PairedResult | None = None
    temperature: Temperature | None = None
    thresholds: MovedThresholds | None = None
    more_rows: float = 1.0
    """Rows of the deployed model for one of those whose held-out rows fitted the temperature."""

    @property
    def deployed(self) -> str:
        """In words."""
        return f"soup of {' + '.join(self.soup)}" if self.soup else f"{self.single.name} ({self.single.said})"

    @property
    def heat(self) -> float:
        """What the logits of the deployed model are divided by. A model of more rows is surer with reason: by the square root of
        their ratio (docs/research/recipes.md)."""
        return 1.0 if self.temperature is None else self.temperature.value / self.more_rows**0.5

    def lines(self) -> tuple[str, ...]:
        """What was chosen, and why."""
        score = self.final[self.metric].text() if self.metric in self.final else ""
        found = [f"best: {self.deployed}, {self.metric} of held-out rows {score}"]
        if self.soup_test is not None:
            verdict = "kept" if self.soup else "not kept"
            found.append(f"best: the soup beside {self.single.name}, {_say(self.soup_test)}: {verdict}")
        if len(self.ensemble) > 1:
            mixed = self.held_out["ensemble"].get(self.metric)
            found.append(f"best: an ensemble of {' + '.join(self.ensemble)} would have {mixed.text() if mixed else ''}")
        if self.gain is not None:
            kept = "; it gained on other tasks, and these rows do not show it worse" if self.single.expected else ""
            found.append(f"best: beside auto, {_say(self.gain)}{kept}")
        if self.temperature is not None:
            more = f"; {self.heat:.3g} for the model of all rows" if self.more_rows > 1 else ""
            found.append(f"best: {self.temperature.line()}{more}")
        if self.thresholds is not None:
            found.append(f"best: {self.thresholds.line('held-out').removesuffix('.')}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """As in best.json."""
        tests = {"soup_beside_single": self.soup_test, "gain_over_auto": self.gain, "temperature": self.temperature}
        moved = self.thresholds
        return {
            "metric": self.metric,
            "deployed": self.deployed,
            "single": {"name": self.single.name, "what": self.single.said},
            "soup": self.soup,
            "ensemble": self.ensemble,
            "held_out": {k: {n: s.to_json() for n, s in v.items()} for k, v in self.held_out.items()},
            **{name: None if found is None else found.to_json() for name, found in tests.items()},
            "heat": self.heat,
            "thresholds": None if moved is None else {"kept": moved.thresholds, "line": moved.line("held-out")},
        }

    def ending(self, enough: Callable[[Event], bool]) -> RunEnding:
        """The end of the last run: averages, scales the head by the temperature, sets thresholds."""
        moved = None if self.thresholds is None else self.thresholds.thresholds
        return RunEnding(enough, self._change, moved, self.lines(), {SPLIT: self.final})

    def _change(self, model: Any) -> None:
        if self.soup:
            stir_in(model, {self.models[n]: w for n, w in self.soup.items() if n in self.models})
        if self.temperature is not None:
            scale_head(model, self.heat)


def _say(tested: PairedResult) -> str:
    if tested.difference is None or tested.low is None or tested.high is None:
        return f"{tested.metric} not defined"
    gap = f"{tested.difference:+.4f} [{tested.low:+.3f}, {tested.high:+.3f}]"
    return f"{tested.metric} {gap}, p={tested.p_value:.2g}, n={tested.n:,}"


def stir_in(model: torch.nn.Module, others: Mapping[Path, float]) -> None:
    """Makes the model the weighted mean of itself and the models of other folders; its own weight is the rest to 1."""
    tables = [(read_weights(folder), weight) for folder, weight in others.items()]
    own, seen = 1 - sum(others.values()), set[int]()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.mul_(own)
                for table, weight in tables:
                    tensor.add_(table[name].to(tensor), alpha=weight)


def scale_head(model: torch.nn.Module, temperature: float) -> None:
    """Divides the logits by the temperature, in the weights: any tool that loads the model has calibrated probabilities."""
    try:
        layer = last_linear(model)
    except ConfigError as error:
        log.warning("the temperature is not applied: %s", error.line())
        return
    with torch.no_grad():
        layer.weight.div_(temperature)
        if layer.bias is not None:
            layer.bias.div_(temperature)


def choose_model(work: Tries, members: Sequence[Variant], seconds: Callable[..., float]) -> Chosen:
    """Judges members, ensemble and soup by rows that each did not see; trains what the soup needs on all rows."""
    members, folds = _comparable(work, members)
    held = {one.name: work.held_out(one, folds) for one in members}
    found = work.outcome(members[0], folds[0])
    metric = (found.metric if found else None) or "loss"
    single = _best(members, held, metric)
    weights = greedy_weights(held, metric)
    alike = [one for one in members if one.name in weights and _kind(one) == _kind(single)]
    share = sum(weights[one.name] for one in alike)
    soup = {one.name: weights[one.name] / share for one in alike} if len(alike) > 1 and single in alike else {}
    suite = make_suite(
        held[single.name].task,
        names=work.config.metric_name,
        glue_task=work.config.task_name,
        scores="probabilities",
        positive_name=held[single.name].positive_name,
    )
    table = {name: rows.scores(suite) for name, rows in held.items()}
    table["ensemble"] = mix_answers([held[n] for n in weights], list(weights.values())).scores(suite)
    deployed, tested, models = held[single.name], None, dict[str, Path]()
    cooked = work.cook(alike, list(soup.values()), folds) if soup else None
    if cooked is not None:
        table["soup"] = cooked.scores(suite)
        tested = compare_held_out(deployed, cooked, metric)
        if not shown_worse(tested, deployed, cooked):
            models = _train_all_rows(work, [one for one in alike if one is not single], seconds)
    if not models or cooked is None:
        soup = {}
    else:
        deployed = cooked
    gain = _gain(work, held, deployed, metric) if soup or single.name != "auto" else None
    heat = fit_temperature(deployed.logits, deployed.gold, deployed.task)
    calm = deployed if heat is None else replace(deployed, logits=deployed.logits / heat.value)
    moved = _move(work, calm, metric)
    final = calm.scores(suite, None if moved is None else moved.decisions)
    more = 1.0 if work.folds == (None,) else FOLDS / (FOLDS - 1)
    return Chosen(metric, single, table, weights, final, soup, models, tested, gain, heat, moved, more)


def _best(members: Sequence[Variant], held: Mapping[str, HeldOut], metric: str) -> Variant:
    """The one with the best score; one that is expected to be better, unless the held-out rows show it worse."""
    found = max(members, key=lambda one: (held[one.name].score(metric), -held[one.name].loss()))
    for one in members:
        a, b = held[found.name], held[one.name]
        if one.expected and not shown_worse(compare_held_out(a, b, metric), a, b):
            return one
    return found


def _comparable(work: Tries, members: Sequence[Variant]) -> tuple[list[Variant], list[int | None]]:
    """The members that have predicted as many folds as can be asked for, and the folds that all of them have."""
    lead = work.done_folds(members[0])
    kept = [one for one in members if len(work.done_folds(one)) >= min(2, len(lead))]
    return kept, [fold for fold in lead if all(fold in work.done_folds(one) for one in kept)]


def _kind(candidate: Variant) -> tuple[Any, Any]:
    """Models of one kind start from the same weights and can be averaged."""
    return candidate.options.get("model_name_or_path"), candidate.options.get("pooling")


def _train_all_rows(work: Tries, others: Sequence[Variant], seconds: Callable[..., float]) -> dict[str, Path]:
    """The models of all rows of the soup's other members; none unless there is time for all of them."""
    paths = {one.name: work.path(one, None, all_rows=True) for one in others}
    needed = sum(seconds(one, all_rows=True) for one in others if paths[one.name].name not in work.record["runs"])
    if work.clock.left() < needed:
        return {}
    with suppress(TimeUp):
        if all(work.train(one, None, all_rows=True).state == "done" for one in others):
            return {name: RunDir(path).model for name, path in paths.items()}
    return {}


def _gain(work: Tries, held: Mapping[str, HeldOut], deployed: HeldOut, metric: str) -> PairedResult:
    """What is deployed beside `auto`: on all held-out rows that both have predicted."""
    auto = held.get("auto")
    if auto is None:
        auto = work.held_out(Variant("auto", ""), work.folds[:1])
    n = len(auto.gold)
    return compare_held_out(auto, replace(deployed, logits=deployed.logits[:n], gold=deployed.gold[:n]), metric)


def _move(work: Tries, rows: HeldOut, metric: str) -> MovedThresholds | None:
    wanted = rows.task is Task.MULTILABEL or metric.startswith("f1") or work.config.move_thresholds
    return fit_thresholds(np.asarray(rows.probabilities), rows.gold, rows.task) if wanted else None
