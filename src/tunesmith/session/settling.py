"""The recipe of a run, settled before the first step: what the user gave, what an earlier start decided, what the probe says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.config.convert import AutoOnOff
from tunesmith.config.load import load_config
from tunesmith.config.schema import Recipe, RunConfig
from tunesmith.encoder.load import LoadedModel
from tunesmith.encoder.params import count_layers, matrix_size
from tunesmith.encoder.pooling import Pooling, last_linear, poolings_of, reads_linearly, set_pooling
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.row_evidence import BestConstant, encode_rows, keep_rows
from tunesmith.metrics.suite import Suite
from tunesmith.ranks.runtime import Runtime
from tunesmith.reading.load import DataBundle
from tunesmith.recipes.contrastive import start_contrastively
from tunesmith.recipes.deciding import Decision, RunFacts, decide
from tunesmith.recipes.probing import Floors, Prober, ProbeResult
from tunesmith.run.layout import RunDir, read_summary
from tunesmith.run.remembered import known_hash
from tunesmith.session.inputs import RunData
from tunesmith.session.watch import Say, Watch
from tunesmith.tokens.batches import Padding
from tunesmith.tokens.token_rows import TokenRows

NAMES = (*(f.name for f in fields(Recipe)), "contrastive_start", "head_start", "metric_for_best_model")
"""Options that a recipe decides."""
PROBE_ROWS = 400
"""Of the probe's answers so many are kept in data_summary.json: about 4 kB."""


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
    say = watch.say if runtime.is_main else Watch().say
    mine: dict[str, Any] = {}
    probe = None
    if runtime.is_main:
        found = _settled_before(config) or _from_scratch(config, loaded, data, splits, padding, suite, runtime, watch)
        probe = found.probe
        lines = [line for line in found.reasons if first is None or not line.startswith(f"{first.name} ")]
        mine = {"values": {n: getattr(found.config, n) for n in NAMES}}
        mine["reasons"] = lines if first is None else [first.line(), *lines]
        mine |= {"floors": found.floors, "head": _head_values(found), "resumed": found.resumed}
    told = runtime.gather_objects(mine)[0]
    config = replace(config, **told["values"])
    set_pooling(loaded.model, config.decided.pooling)
    if told["head"] is not None:
        _start_head(loaded.model, *told["head"])
    _say_settled(say, config, told["reasons"], told["floors"])
    if config.contrastive_start == "on" and not told["resumed"]:
        _contrast(config, loaded, data.bundle, splits["train"], padding, runtime, watch)
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


def _from_scratch(
    config: RunConfig,
    loaded: LoadedModel,
    data: RunData,
    splits: Mapping[str, TokenRows],
    padding: Padding,
    suite: Suite,
    runtime: Runtime,
    watch: Watch,
) -> Settled:
    wanted = config.recipe != "hf" or config.head_start == "on"
    probe = None
    if wanted and runtime.sharding is None:
        prober = Prober(
            loaded.model.to(runtime.device),
            splits,
            lambda split, rows: _texts(data.bundle, split, rows),
            padding,
            data.bundle.labels,
            suite,
            runtime,
            loaded.fresh,
            _content(data.folder),
            config.cache_dir,
            watch.aside.start,
        )
        probe = prober.look(lambda done, total: watch.progress("probing", done, total))
    if config.head_start == "on" and (probe is None or (config.pooling or probe.pooling) not in probe.fits):
        raise ConfigError("--head_start on is not possible: there is no linear model to start from")
    floors, kept = (probe.floors, probe_evidence(probe, splits["train"], data.bundle.labels)) if probe else ({}, None)
    if config.recipe == "hf":
        return Settled(_closed(config), (), floors, probe, probe_rows=kept)
    facts = _facts(config, loaded, data.bundle, splits, runtime, probe)
    decisions = decide(config, replace(facts, metrics=tuple(suite.names)))
    config = replace(config, **{d.name: d.value for d in decisions})
    return Settled(_closed(config), tuple(d.line() for d in decisions), floors, probe, probe_rows=kept)


def probe_evidence(probe: ProbeResult, train: TokenRows, labels: LabelMap) -> str | None:
    """What the probe says of training rows that it has not seen, as text."""
    assert train.labels is not None
    constant = BestConstant.of(labels.task, train.labels, len(labels))
    kept = keep_rows(constant, probe.fit.held_out.cpu().numpy(), train.labels[probe.rows], PROBE_ROWS)
    return None if kept is None else encode_rows(kept)


def _closed(config: RunConfig) -> RunConfig:
    contrast: AutoOnOff = "on" if config.contrastive_start == "on" else "off"
    start: AutoOnOff = contrast if config.head_start == "auto" else config.head_start
    return replace(config, **asdict(config.decided), contrastive_start=contrast, head_start=start)


def _facts(
    config: RunConfig,
    loaded: LoadedModel,
    bundle: DataBundle,
    splits: Mapping[str, TokenRows],
    runtime: Runtime,
    probe: ProbeResult | None,
) -> RunFacts:
    model: Any = loaded.model
    shape = model.config
    facts = RunFacts(
        model_type=str(shape.model_type),
        width=int(getattr(shape, "hidden_size", 0) or getattr(shape, "dim", 0) or getattr(shape, "d_model", 768)),
        layers=count_layers(model),
        rows=len(splits["train"]),
        classes=len(bundle.labels),
        task=bundle.labels.task,
        world=runtime.world,
        rarest=_rarest(bundle, splits["train"]),
        new_head=_head_is_new(loaded),
        matrix_size=matrix_size(model),
    )
    if probe is None:
        mean = facts.new_head and "mean" in poolings_of(model)
        return replace(facts, pooling="mean") if mean else facts
    chosen, why = pooling_for(probe.pooling, probe.why, loaded.fresh)
    pooling = config.pooling or chosen
    fits = pooling in probe.fits and reads_linearly(model, pooling) and _head_is_new(loaded)
    return replace(facts, pooling=chosen, why=why, head_fits=fits)


def pooling_for(pooling: Pooling, why: str, fresh: Sequence[str]) -> tuple[Pooling, str]:
    """What the probe chose; where that is the first token and the dense layer of the head is new, the mean.

    The first token would be read through a fixed layer in place of one that the model was to learn. That cost
    granite-embedding-30m (RoBERTa) up to 9 points; the mean was as good as its own head or better (docs/how_to/better_models.md).
    """
    if pooling == "first" and any("classifier.dense" in name or "pooler.dense" in name for name in fresh):
        return "mean", f"the dense layer of the head is new, and the first token was {why}"
    return pooling, why


def _rarest(bundle: DataBundle, rows: TokenRows) -> tuple[int, str, float] | None:
    if bundle.labels.task not in (Task.BINARY, Task.MULTICLASS) or rows.labels is None or not len(rows):
        return None
    counts = np.bincount(rows.labels[rows.labels >= 0], minlength=len(bundle.labels))
    number = int(counts.argmin())
    return number, bundle.labels.names[number], float(counts[number] / max(counts.sum(), 1))


def _head_is_new(loaded: LoadedModel) -> bool:
    return any(name.startswith("classifier") for name in loaded.fresh)


def _head_values(found: Settled) -> list[npt.NDArray[Any]] | None:
    if found.probe is None or found.config.head_start != "on" or found.config.contrastive_start == "on":
        return None
    fit = found.probe.fits[found.config.decided.pooling]
    return [fit.weights.float().cpu().numpy(), fit.bias.float().cpu().numpy()]


def _contrast(
    config: RunConfig,
    loaded: LoadedModel,
    bundle: DataBundle,
    rows: TokenRows,
    padding: Padding,
    runtime: Runtime,
    watch: Watch,
) -> None:
    if bundle.labels.task not in (Task.BINARY, Task.MULTICLASS) or runtime.world > 1 or config.freeze:
        raise ConfigError(
            "--contrastive_start on is not possible: it is for rows of one label each, one process and no --freeze",
            fix="Leave it out.",
        )
    start_contrastively(
        loaded.model.to(runtime.device),
        rows,
        padding,
        bundle.labels,
        runtime,
        learning_rate=config.decided.learning_rate,
        fit_head=config.head_start == "on",
        seed=config.seed,
        on_step=lambda done, total: watch.progress("contrasting", done, total),
    )


def _start_head(model: Any, weights: npt.NDArray[Any], bias: npt.NDArray[Any]) -> None:
    layer = last_linear(model)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.asarray(weights)))
        layer.bias.copy_(torch.from_numpy(np.asarray(bias)))


def _texts(bundle: DataBundle, split: str, rows: npt.NDArray[np.int64]) -> Sequence[str]:
    some = bundle.splits[split].select(rows)
    columns = [list(some[name]) for name in bundle.columns.text]
    return [" ".join(str(cell) for cell in cells) for cells in zip(*columns, strict=True)]


def _content(folder: Path) -> str:
    weights = sorted(folder.glob("model*.safetensors"))
    return " ".join(known_hash(p) for p in weights)


def _say_settled(say: Say, config: RunConfig, reasons: Sequence[str], floors: Floors) -> None:
    for reason in reasons:
        say(f"Recipe: {reason}.")
    for split, by_name in floors.items():
        for name, scores in by_name.items():
            metric, score = next(iter(scores.items()))
            if score.get("value") is not None:
                say(f"Floor: {name}, {split} {metric} {score['value']:.3f} (n={score['n']}).")
