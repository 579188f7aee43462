"""The recipe of a run: every option that the user did not set, decided from model, data and linear probe, with its reason.

This is the only place where options change. The rules were chosen on some tasks and measured on others:
docs/guides/better_models.md describes them and what did not help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from tunesmith.config.load import load_config
from tunesmith.config.options import AutoOnOff, Recipe, RunConfig
from tunesmith.data.batches import TokenRows
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.calibration import LabelNoise
from tunesmith.models.families import Pooling, poolings_of, reads_linearly, set_pooling
from tunesmith.pipeline.inputs import Decision
from tunesmith.pipeline.probe import (
    FEWEST_ROWS,
    PAIRS_IN_A_STEP,
    Baselines,
    LoadedRun,
    PairReadings,
    PairTexts,
    ProbeResult,
    linear_probe,
    read_pairs,
    start_head,
    warm_up_on_pairs,
)
from tunesmith.runs.folder import RunDir, read_summary
from tunesmith.training.optimizer import count_layers, matrix_size

NAMES = (*(f.name for f in fields(Recipe)), "head_start", "metric_for_best_model", "load_best_model_at_end")
"""Options that a recipe decides."""


@dataclass(frozen=True)
class Settled:
    """`config` has a value for every option of the recipe; `reasons` are the decisions as lines."""

    config: RunConfig
    reasons: tuple[str, ...] = ()
    baselines: Baselines = field(default_factory=dict)
    """As in metrics.json."""
    probe_rows: str | None = None
    """Predictions of the linear probe for training examples, for the diagnosis."""
    label_noise: LabelNoise | None = None
    """Estimated share of wrong training labels."""
    resumed: bool = False
    pairs: PairReadings | None = None


def choose_recipe(run: LoadedRun, first: Decision | None = None) -> Settled:
    """Decide on rank 0, share the result with the other ranks, and give the model its pooling and initial head.

    `first` was decided earlier from the same data. A resumed run keeps the decisions of its first start.
    """
    found = Settled(run.config)
    if run.runtime.is_main:
        found = _chosen_before(run.config) or _choose(run)
        lines = [line for line in found.reasons if first is None or not line.startswith(f"{first.name} ")]
        found = replace(found, reasons=tuple(lines if first is None else [first.line(), *lines]))
    mine = [{n: getattr(found.config, n) for n in NAMES}, found.reasons, found.baselines, found.resumed]
    values, reasons, baselines, resumed = run.runtime.gather_objects(mine)[0]
    found = replace(
        found, config=replace(run.config, **values), reasons=tuple(reasons), baselines=baselines, resumed=resumed
    )
    config, pooling = found.config, found.config.decided.pooling
    set_pooling(run.loaded.model, pooling)
    if run.runtime.is_main:
        _report(run, found)
    if config.pair_start and not resumed:
        if found.pairs is None or run.runtime.world > 1 or config.freeze:
            raise ConfigError(
                f"--pair_start {config.pair_start} is not possible: it requires text pairs, a single process and no --freeze",
                fix="Omit it.",
            )
        rate = config.decided.learning_rate
        warm_up_on_pairs(run, found.pairs, steps=config.pair_start, learning_rate=rate)
    if config.head_start == "on" and not resumed:
        start_head(run)
    return replace(found, pairs=None)


def _chosen_before(config: RunConfig) -> Settled | None:
    """Return the recipe of an unfinished run in this folder."""
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
    reasons, baselines = tuple(summary.get("recipe") or ()), summary.get("baselines") or {}
    return Settled(
        _closed(replace(config, **values)),
        reasons,
        baselines,
        summary.get("probe_rows"),
        LabelNoise.from_json(summary.get("label_noise")),
        resumed=True,
    )


def _choose(run: LoadedRun) -> Settled:
    """Probe the frozen encoder if the recipe needs it, then decide the options that are not set."""
    config, train, labels = run.config, run.splits["train"], run.bundle.labels
    asked = bool(config.pair_start)
    wanted = config.recipe != "hf" or asked
    probe = linear_probe(run) if wanted else None
    facts, pairs = facts_of(run, probe), None
    if wanted and PairTexts.of(train.select(np.arange(min(len(train), 50)))) is not None and config.pair_start != 0:
        why = None if asked else why_no_start(config, facts)
        if why is None:
            pairs, why = read_pairs(run)
        facts = replace(facts, pairs=pairs is not None, why_pairs=why)
    decisions = [] if config.recipe == "hf" else decide(config, facts)
    config = _closed(replace(config, **{d.name: d.value for d in decisions}))
    return Settled(
        config,
        tuple(d.line() for d in decisions),
        probe.baselines if probe else {},
        probe.evidence(train, labels) if probe else None,
        probe.label_noise if probe else None,
        pairs=pairs,
    )


def _closed(config: RunConfig) -> RunConfig:
    start: AutoOnOff = "on" if config.head_start == "on" else "off"
    return replace(config, **asdict(config.decided), head_start=start)


def _report(run: LoadedRun, found: Settled) -> None:
    for reason in found.reasons:
        run.observer.log(f"Recipe: {reason}.")
    if found.reasons:
        chosen = found.config.decided
        length = "" if found.config.max_steps > 0 else f"epochs {chosen.num_train_epochs:g}, "
        run.observer.log(
            f"Decided: learning rate {chosen.learning_rate:g}, {length}batch size {chosen.per_device_train_batch_size}, "
            f"{chosen.pooling} pooling (reasons: -v)."
        )
    if found.baselines:
        split, by_name = list(found.baselines.items())[-1]  # the test set, if there is one
        firsts = {name: next(iter(scores.items())) for name, scores in by_name.items()}
        shown = [
            f"{name} {score['value']:.3f}" for name, (_, score) in firsts.items() if score.get("value") is not None
        ]
        if shown:
            metric, score = next(iter(firsts.values()))
            run.observer.log(f"Baselines, {split} {metric} (n={score['n']}): {', '.join(shown)}.")
    if found.label_noise is not None and found.label_noise.is_noisy:
        run.observer.log(f"Labels: a linear probe estimates that {found.label_noise.text()} are wrong.")


def facts_of(run: LoadedRun, probe: ProbeResult | None) -> RunFacts:
    """Return the inputs of the decisions."""
    model: Any = run.loaded.model
    shape, labels = model.config, run.bundle.labels
    new_head = any(name.startswith("classifier") for name in run.loaded.fresh)
    facts = RunFacts(
        model_type=str(shape.model_type),
        width=int(getattr(shape, "hidden_size", 0) or getattr(shape, "dim", 0) or getattr(shape, "d_model", 768)),
        layers=count_layers(model),
        rows=len(run.splits["train"]),
        classes=len(labels),
        task=labels.task,
        world=run.runtime.world,
        judged=len(run.splits["validation"]) if "validation" in run.splits else None,
        rarest=_rarest(labels, run.splits["train"]),
        new_head=new_head,
        matrix_size=matrix_size(model),
        metrics=tuple(run.suite.names),
    )
    if probe is not None:
        chosen, why = pooling_for(probe.pooling, probe.why, run.loaded.fresh)
        facts = replace(facts, pooling=chosen, why=why)
    elif new_head and "mean" in poolings_of(model):
        facts = replace(facts, pooling="mean")
    fits = new_head and reads_linearly(model, run.config.pooling or facts.pooling)
    return replace(facts, no_head=None) if fits else facts


def pooling_for(pooling: Pooling, why: str, fresh: Sequence[str]) -> tuple[Pooling, str]:
    """Return the pooling that the probe chose; the mean if that is the first token and the dense layer of the head is new.

    Otherwise, a fixed layer would replace the one that the model has to learn. That cost
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


USUAL_EPOCHS = 3.0
MOST_EPOCHS = 10.0
FEWEST_STEPS = 400
"""Fewer updates hardly change an encoder, so small datasets get more epochs, up to MOST_EPOCHS."""
FEW_UPDATES, FEW_ROWS_EPOCHS = 150, 30.0
"""If MOST_EPOCHS are fewer updates than that, up to FEW_ROWS_EPOCHS, and the head starts fitted: up to 120 updates that was
better, with 160 or more it was not (docs/research/recipes.md)."""
LARGEST_RATE = 1.5e-4
USUAL_SIZE, MOST_TIMES = 0.061, 2.0
"""Root mean square of all-MiniLM-L6-v2's matrices, at width 384. A step of Adam has the same length for all weights:
it changes larger weights less. granite-embedding-30m has 2.6 times the size and was best at twice the rate."""
RARE = 0.1
"""A label with a smaller share of the rows hardly affects accuracy."""
FEWEST_PAIR_STEPS, MOST_PAIR_STEPS = 200, 600
"""With 500 rows, 600 steps gained twice as much as 200. As many pairs as training rows take about as long as training."""
FEW_JUDGED = 20
"""Validation rows: with 6 and 12 of them the weights that scored best were 2.9 points worse on test rows than the last ones
(trec, subj, cr; 12 runs)."""


@dataclass(frozen=True)
class RunFacts:
    """The inputs of the decisions. `pooling` and `why` are the probe's; `no_head`: why no linear
    model can start the head."""

    model_type: str
    width: int
    layers: int
    rows: int
    classes: int
    task: Task
    world: int = 1
    judged: int | None = None
    """Validation rows; None: there is no validation."""
    pooling: Pooling = "pooler"
    why: str = "too few rows for a probe"
    no_head: str | None = "the head is not a newly initialized linear layer"
    new_head: bool = False
    """The last layer is not in the checkpoint."""
    matrix_size: float = 0.0
    """Root mean square of the matrices of the encoder's layers; 0: not known."""
    rarest: tuple[int, str, float] | None = None
    """Id, name and share of the label with the fewest training rows, if each row has one label."""
    metrics: tuple[str, ...] = ()
    """The metrics that the run computes."""
    pairs: bool | None = None
    """Whether a warm-up on text pairs is possible; None: examples have one text."""
    why_pairs: str = ""


def decide(config: RunConfig, facts: RunFacts) -> list[Decision]:
    """Options that the user did not set, in printed order. An option that is set is never changed."""
    return [decision for decision in _all(config, facts) if _is_open(config, decision.name)]


def _is_open(config: RunConfig, name: str) -> bool:
    value = getattr(config, name)
    return value is None or (name == "head_start" and value == "auto")


def _all(config: RunConfig, facts: RunFacts) -> Iterator[Decision]:
    yield Decision("pooling", facts.pooling, facts.why)
    start, why = _head_start(config, facts)
    yield Decision("head_start", "on" if start else "off", why)
    batch, reason = _batch(facts)
    yield Decision("per_device_train_batch_size", batch, reason)
    rows = config.per_device_train_batch_size or batch
    epochs, reason = epochs_for(facts.rows, rows * config.gradient_accumulation_steps * facts.world)
    yield Decision("num_train_epochs", epochs, reason)
    if facts.pairs is not None:
        yield Decision("pair_start", *_pair_start(facts, epochs))
    rate, reason = _rate(facts)
    yield Decision("learning_rate", rate, reason)
    yield Decision("warmup_steps", 0.1, "a tenth of the steps, until Adam's averages are stable")
    yield Decision("layerwise_lr_decay", 0.9, f"lower layers (of {facts.layers}) are general and need smaller updates")
    yield from _metric(facts)
    if facts.judged is not None and facts.judged < FEW_JUDGED and config.early_stopping_patience is None:
        why = f"{facts.judged} validation rows are too few to select the best weights"
        yield Decision("load_best_model_at_end", False, why)


def why_no_start(config: RunConfig, facts: RunFacts) -> str | None:
    """Return why a run has no pair warm-up, unless it is requested."""
    if config.max_steps > 0 or config.num_train_epochs is not None:
        return "the number of steps or epochs is set"
    if facts.world > 1 or config.freeze or not facts.new_head:
        return "it requires a single process, a new head and an unfrozen encoder"
    if facts.rows < FEWEST_ROWS:
        return f"{facts.rows} examples are too few"
    return None


def _pair_start(facts: RunFacts, epochs: float) -> tuple[int, str]:
    """Return the warm-up steps: as many pairs as training rows, within limits."""
    if not facts.pairs:
        return 0, facts.why_pairs
    steps = round(min(max(epochs * facts.rows / PAIRS_IN_A_STEP, FEWEST_PAIR_STEPS), MOST_PAIR_STEPS))
    return steps, f"{facts.why_pairs}: the model first learns their similarity, without labels"


def _head_start(config: RunConfig, facts: RunFacts) -> tuple[bool, str]:
    """Decide whether the head starts fitted. This is for runs that are too short for a random head to learn."""
    if facts.no_head is not None:
        return False, facts.no_head
    rows = config.per_device_train_batch_size or _batch(facts)[0]
    rows *= config.gradient_accumulation_steps * facts.world
    steps = (config.num_train_epochs or epochs_for(facts.rows, rows)[0]) * facts.rows / rows
    steps = config.max_steps if config.max_steps > 0 else steps
    if steps <= FEW_UPDATES:
        return True, f"a random head would learn little in {steps:.0f} updates"
    return False, "with a random head, the encoder learns more"


def _metric(facts: RunFacts) -> Iterator[Decision]:
    """Select the checkpoint by F1 if a label is rare, because it hardly affects accuracy."""
    if facts.rarest is None or facts.rarest[2] >= RARE:
        return
    number, name, share = facts.rarest
    metric = "f1" if facts.task is Task.BINARY and number == 1 else "f1_macro"
    if metric in facts.metrics:
        yield Decision("metric_for_best_model", metric, f"label {name} has {share:.1%} of the rows")


def _batch(facts: RunFacts) -> tuple[int, str]:
    rows = facts.rows
    size = 8 if rows < 20_000 else 16 if rows < 100_000 else 32
    return max(1, size // facts.world) if facts.world <= size else 1, (
        f"small batches allow more updates with {rows:,} rows"
        if size == 8
        else f"{rows:,} rows are enough for larger batches"
    )


def epochs_for(rows: int, batch: int) -> tuple[float, str]:
    """Return the number of epochs, and why. `batch` is the number of rows per update on all ranks."""
    steps = max(1.0, rows / batch)
    needed = float(-(-FEWEST_STEPS // steps))
    most = max(MOST_EPOCHS, min(FEW_UPDATES // steps, FEW_ROWS_EPOCHS))
    epochs = min(max(USUAL_EPOCHS, needed), most)
    if epochs > USUAL_EPOCHS:
        return epochs, f"{rows:,} rows need more epochs to reach {steps * epochs:,.0f} updates"
    return epochs, f"{steps * epochs:,.0f} updates are enough"


def _rate(facts: RunFacts) -> tuple[float, str]:
    """Return the learning rate: 1e-4 at width 384, 3.5e-5 at 768, 2.3e-5 at 1024; higher for larger weights."""
    width = max(facts.width, 1)
    rate, kind = min(1e-4 * (384 / width) ** 1.5, LARGEST_RATE), ""
    times = facts.matrix_size / (USUAL_SIZE * (384 / width) ** 0.5)
    if facts.model_type.startswith("deberta"):
        rate, kind = rate / 2, f", halved for {facts.model_type}"
    elif facts.model_type == "modernbert":
        rate, kind = rate * 2, f", doubled for {facts.model_type}"
    elif times > 1:
        rate, kind = rate * min(times, MOST_TIMES), f" and the size of its weights ({times:.1f} times the usual)"
    return float(f"{rate:.2g}"), f"from the hidden size of the model ({facts.width}){kind}"
