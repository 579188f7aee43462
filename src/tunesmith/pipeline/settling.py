"""The recipe of a run, settled before the first step: what the user gave, what an earlier start decided, what the probe says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.config.convert import AutoOnOff
from tunesmith.config.load import load_config
from tunesmith.config.schema import Recipe, RunConfig
from tunesmith.data.batches import Padding
from tunesmith.data.read import DataBundle
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.table import Suite
from tunesmith.models.load import LoadedModel
from tunesmith.models.pooling import Pooling, last_linear, poolings_of, reads_linearly, set_pooling
from tunesmith.pipeline.deciding import Decision, RunFacts, decide, why_no_start
from tunesmith.pipeline.inputs import RunData
from tunesmith.pipeline.pairs import PairReadings, PairTexts, start_with_pairs
from tunesmith.pipeline.probing import Floors, Prober, ProbeResult, is_known, probe_evidence, rows_to_see
from tunesmith.pipeline.starting import fit_head, what_head_reads
from tunesmith.pipeline.watch import Say, Watch
from tunesmith.runs.folder import RunDir, read_summary
from tunesmith.runs.writing import known_hash
from tunesmith.training.distributed import Runtime
from tunesmith.training.optimizer import count_layers, matrix_size

NAMES = (*(f.name for f in fields(Recipe)), "head_start", "metric_for_best_model", "load_best_model_at_end")
"""Options that a recipe decides."""
PAIR_STAGE = "learning pairs"


@dataclass(frozen=True)
class Settled:
    """`config` has no open option of the recipe. `reasons` are the decisions in lines, `floors` as in metrics.json."""

    config: RunConfig
    reasons: tuple[str, ...] = ()
    floors: Floors = field(default_factory=dict)
    probe: ProbeResult | None = None
    resumed: bool = False
    probe_rows: str | None = None
    """The probe's answers for training rows, as row evidence: the diagnosis reads them."""
    pairs: PairReadings | None = None


def settle_recipe(
    config: RunConfig,
    loaded: LoadedModel,
    data: RunData,
    splits: Mapping[str, TokenRows],
    padding: Padding,
    suite: Suite,
    runtime: Runtime,
    watch: Watch,
    first: Decision | None = None,
) -> Settled:
    """Decides on rank 0, tells the other ranks, and gives the model its pooling and first head.

    `first` was decided before, from the same data: a resumed run has its line already.
    """
    run = _Unsettled(config, loaded, data.bundle, data.folder, splits, padding, suite, runtime, watch)
    mine: dict[str, Any] = {}
    probe, pairs = None, None
    if runtime.is_main:
        found = _settled_before(config) or run.settle()
        probe, pairs = found.probe, found.pairs
        lines = [line for line in found.reasons if first is None or not line.startswith(f"{first.name} ")]
        mine = {"values": {n: getattr(found.config, n) for n in NAMES}}
        mine["reasons"] = lines if first is None else [first.line(), *lines]
        mine |= {"floors": found.floors, "resumed": found.resumed}
    told = runtime.gather_objects(mine)[0]
    config = replace(config, **told["values"])
    set_pooling(loaded.model, config.decided.pooling)
    if runtime.is_main:
        _say_settled(watch.say, told["reasons"], told["floors"])
    if config.pair_start and not told["resumed"]:
        run.start_with_pairs(config, pairs)
    if config.head_start == "on" and not told["resumed"]:
        run.start_head(None if config.pair_start else probe, config.decided.pooling)
    kept = found.probe_rows if runtime.is_main else None
    return Settled(config, tuple(told["reasons"]), told["floors"], probe, probe_rows=kept)


def _settled_before(config: RunConfig) -> Settled | None:
    """What an unfinished run of this folder was started with: a resumed run decides nothing anew."""
    run = RunDir(config.run_folder)
    if not run.checkpoints() or not run.config_file.is_file():
        return None
    try:
        earlier = load_config(run.config_file, need_data=False)
    except ConfigError:
        return None
    if earlier.recipe != config.recipe:
        return None
    given = {n: getattr(config, n) for n in NAMES if getattr(config, n) not in (None, "auto")}
    values = {n: getattr(earlier, n) for n in NAMES} | given
    try:
        summary = read_summary(run.data_summary_file)
    except CheckpointError:  # it is written again at every start
        summary = {}
    reasons, floors = tuple(summary.get("recipe") or ()), summary.get("floors") or {}
    return Settled(_closed(replace(config, **values)), reasons, floors, None, True, summary.get("probe_rows"))


@dataclass(frozen=True)
class _Unsettled:
    """A run whose recipe has open options, and what they are decided from."""

    config: RunConfig
    loaded: LoadedModel
    bundle: DataBundle
    folder: Path
    splits: Mapping[str, TokenRows]
    padding: Padding
    suite: Suite
    runtime: Runtime
    watch: Watch

    def settle(self) -> Settled:
        """Probes the frozen encoder if the recipe needs it, then decides the options that the user left open."""
        config = self.config
        wanted = config.recipe != "hf" or bool(config.pair_start)
        prober = self._prober() if wanted else None
        shown = partial(self.watch.progress, "probing")
        probe = None if prober is None else prober.look(shown)
        floors = probe.floors if probe else {}
        facts = self._facts(probe)
        pairs, facts = self._pairs(prober, probe, facts)
        kept = None if probe is None else probe_evidence(probe, self.splits["train"], self.bundle.labels)
        decisions = [] if config.recipe == "hf" else decide(config, facts)
        config, lines = replace(config, **{d.name: d.value for d in decisions}), tuple(d.line() for d in decisions)
        return Settled(_closed(config), lines, floors, probe, probe_rows=kept, pairs=pairs)

    def _pairs(
        self, prober: Prober | None, probe: ProbeResult | None, facts: RunFacts
    ) -> tuple[PairReadings | None, RunFacts]:
        """The two texts of rows read alone, where a pair start is asked for or may be decided on, and what they say."""
        some = np.arange(min(len(self.splits["train"]), 50))
        if self.config.pair_start == 0 or prober is None or PairTexts.of(self.splits["train"].select(some)) is None:
            return None, facts
        asked = bool(self.config.pair_start)
        why_not = None if asked else why_no_start(self.config, facts)
        pairs, why = prober.look_at_pairs(probe, asked=asked) if why_not is None else (None, why_not)
        return pairs, replace(facts, pairs=pairs is not None, why_pairs=why)

    def _prober(self) -> Prober:
        weights = sorted(self.folder.glob("model*.safetensors"))
        return Prober(
            self.loaded.model.to(self.runtime.device),
            self.splits,
            self._texts,
            self.padding,
            self.bundle.labels,
            self.suite,
            self.runtime,
            self.loaded.fresh,
            " ".join(known_hash(p) for p in weights),
            self.config.cache_dir,
        )

    def _texts(self, split: str, rows: npt.NDArray[np.int64]) -> Sequence[str]:
        some = self.bundle.splits[split].select(rows)
        columns = [list(some[name]) for name in self.bundle.columns.text]
        return [" ".join(str(cell) for cell in cells) for cells in zip(*columns, strict=True)]

    def _facts(self, probe: ProbeResult | None) -> RunFacts:
        model: Any = self.loaded.model
        shape, labels = model.config, self.bundle.labels
        new_head = any(name.startswith("classifier") for name in self.loaded.fresh)
        facts = RunFacts(
            model_type=str(shape.model_type),
            width=int(getattr(shape, "hidden_size", 0) or getattr(shape, "dim", 0) or getattr(shape, "d_model", 768)),
            layers=count_layers(model),
            rows=len(self.splits["train"]),
            classes=len(labels),
            task=labels.task,
            world=self.runtime.world,
            judged=len(self.splits["validation"]) if "validation" in self.splits else None,
            rarest=_rarest(labels, self.splits["train"]),
            new_head=new_head,
            matrix_size=matrix_size(model),
            metrics=tuple(self.suite.names),
        )
        if probe is not None:
            chosen, why = pooling_for(probe.pooling, probe.why, self.loaded.fresh)
            facts = replace(facts, pooling=chosen, why=why)
        elif new_head and "mean" in poolings_of(model):
            facts = replace(facts, pooling="mean")
        fits = new_head and reads_linearly(model, self.config.pooling or facts.pooling)
        return replace(facts, no_head=None) if fits else facts

    def start_with_pairs(self, config: RunConfig, pairs: PairReadings | None) -> None:
        """The pair start, as the settled config asks for it."""
        if pairs is None or self.runtime.world > 1 or config.freeze:
            raise ConfigError(
                f"--pair_start {config.pair_start} is not possible: it is for rows of two texts, one process and no --freeze",
                fix="Leave it out.",
            )
        start_with_pairs(
            self.loaded.model.to(self.runtime.device),
            pairs,
            self.padding,
            self.runtime,
            steps=config.decided.pair_start,
            learning_rate=config.decided.learning_rate,
            seed=config.seed,
            on_step=lambda done, total: self.watch.progress(PAIR_STAGE, done, total),
            most=self.watch.start_steps,
        )

    def start_head(self, probe: ProbeResult | None = None, pooling: Pooling = "pooler") -> None:
        """The last layer becomes a linear model of what it reads of as many rows as the probe sees, the same on all ranks.

        What it reads is what the probe has read, unless the encoder has learned since.
        """
        model, rows = self.loaded.model.to(self.runtime.device), self.splits["train"]
        head = None
        if self.runtime.is_main:
            rows = rows.select(rows_to_see(len(rows)))
            assert rows.labels is not None
            rows = rows.select(np.flatnonzero(is_known(rows.labels)))
            assert rows.labels is not None
            read = None if probe is None or not reads_linearly(model, pooling) else probe.read.get(pooling)
            if read is None:
                read = what_head_reads(model, rows, self.padding, self.runtime)
            head = fit_head(read, rows.labels, self.bundle.labels)
        layer = last_linear(model)
        with torch.no_grad():
            for old, new in zip((layer.weight, layer.bias), self.runtime.gather_objects(head)[0], strict=True):
                old.copy_(torch.from_numpy(new))


def _closed(config: RunConfig) -> RunConfig:
    start: AutoOnOff = "on" if config.head_start == "on" else "off"
    return replace(config, **asdict(config.decided), head_start=start)


def pooling_for(pooling: Pooling, why: str, fresh: Sequence[str]) -> tuple[Pooling, str]:
    """What the probe chose; where that is the first token and the dense layer of the head is new, the mean.

    The first token would be read through a fixed layer in place of one that the model was to learn. That cost
    granite-embedding-30m (RoBERTa) up to 9 points; the mean was as good as its own head or better (docs/research/recipes.md).
    """
    if pooling == "first" and any("classifier.dense" in name or "pooler.dense" in name for name in fresh):
        return "mean", f"the dense layer of the head is new, and the first token was {why}"
    return pooling, why


def _rarest(labels: LabelMap, rows: TokenRows) -> tuple[int, str, float] | None:
    if labels.task not in (Task.BINARY, Task.MULTICLASS) or rows.labels is None or not len(rows):
        return None
    counts = np.bincount(rows.labels[rows.labels >= 0], minlength=len(labels))
    number = int(counts.argmin())
    return number, labels.names[number], float(counts[number] / max(counts.sum(), 1))


def _say_settled(say: Say, reasons: Sequence[str], floors: Floors) -> None:
    for reason in reasons:
        say(f"Recipe: {reason}.")
    for split, by_name in floors.items():
        for name, scores in by_name.items():
            metric, score = next(iter(scores.items()))
            if score.get("value") is not None:
                say(f"Floor: {name}, {split} {metric} {score['value']:.3f} (n={score['n']}).")
