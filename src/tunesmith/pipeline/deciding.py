"""`--recipe auto`: each option of a Recipe that was not given, decided from model, data and probe, with its reason.

The rules were chosen on some tasks and measured on others: docs/research/recipes.md has the table and what did not help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.labels import Task
from tunesmith.models.pooling import Pooling

USUAL_EPOCHS = 3.0
MOST_EPOCHS = 10.0
FEWEST_STEPS = 400
"""Fewer updates leave an encoder near where it started: passes are added for small data, up to MOST_EPOCHS."""
FEW_UPDATES, FEW_ROWS_EPOCHS = 150, 30.0
"""Where MOST_EPOCHS are fewer updates than that, up to FEW_ROWS_EPOCHS, and the head starts fitted: up to 120 updates that was
better, from 160 on it was not (docs/research/recipes.md)."""
LARGEST_RATE = 1.5e-4
USUAL_SIZE, MOST_TIMES = 0.061, 2.0
"""Root mean square of all-MiniLM-L6-v2's matrices, at width 384. A step of Adam has the same length whatever the weights are:
where they are larger, it changes them less. granite-embedding-30m has 2.6 times the size and was best at twice the rate."""
RARE = 0.1
"""A label with a smaller share of the rows is one that accuracy hardly sees."""
PAIRS_IN_A_STEP, FEWEST_PAIR_STEPS, MOST_PAIR_STEPS = 32, 200, 600
"""With 500 rows 600 steps gained twice what 200 did; as many pairs as rows pass through the model cost about as much as they."""
FEW_JUDGED = 20
"""Validation rows: with 6 and 12 of them the weights that scored best were 2.9 points worse on test rows than the last ones
(trec, subj, cr; 12 runs)."""


@dataclass(frozen=True)
class Decision:
    """One option, what was decided, and why."""

    name: str
    value: Any
    reason: str

    def line(self) -> str:
        """As it is printed."""
        shown = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        shown = shown.lower() if isinstance(self.value, bool) else shown
        return f"{self.name} {shown}: {self.reason}"


@dataclass(frozen=True)
class RunFacts:
    """What decisions are made from. `pooling` and `why` are the probe's; `no_head`: why no linear
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
    no_head: str | None = "the head is not a new linear layer of what the encoder says"
    new_head: bool = False
    """The last layer is not in the checkpoint."""
    matrix_size: float = 0.0
    """Root mean square of the matrices of the encoder's layers; 0: not known."""
    rarest: tuple[int, str, float] | None = None
    """Id, name and share of the label with the fewest training rows, where rows have one label each."""
    metrics: tuple[str, ...] = ()
    """The metrics that the run computes."""
    pairs: bool | None = None
    """Whether two texts read alone say more of a row than both read at once; None: rows have one text."""
    why_pairs: str = ""


def decide(config: RunConfig, facts: RunFacts) -> list[Decision]:
    """What the user left open, in the order it is printed. A flag wins: what is given is not decided."""
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
    epochs, reason = epochs_for(facts, config.per_device_train_batch_size or batch, config.gradient_accumulation_steps)
    yield Decision("num_train_epochs", epochs, reason)
    if facts.pairs is not None:
        yield Decision("pair_start", *_pair_start(facts, epochs))
    rate, reason = _rate(facts)
    yield Decision("learning_rate", rate, reason)
    yield Decision("warmup_steps", 0.1, "a tenth of the steps, while Adam's averages fill")
    yield Decision("layerwise_lr_decay", 0.9, f"lower layers of {facts.layers} are general already and move less")
    yield Decision("head_lr_scale", 1.0, "a faster head gained nothing")
    yield Decision("weight_decay", 0.0, "decay gained nothing")
    yield from _metric(facts)
    if facts.judged is not None and facts.judged < FEW_JUDGED and config.early_stopping_patience is None:
        why = f"{facts.judged} validation rows cannot tell which weights are the best"
        yield Decision("load_best_model_at_end", False, why)


def why_no_start(config: RunConfig, facts: RunFacts) -> str | None:
    """Why a run takes no steps before its first one, unless they are asked for."""
    if config.max_steps > 0 or config.num_train_epochs is not None:
        return "the length of the training is given"
    if facts.world > 1 or config.freeze or not facts.new_head:
        return "it is for one process, a new head and an encoder that is trained"
    return None


def _pair_start(facts: RunFacts, epochs: float) -> tuple[int, str]:
    """As many pairs as rows pass through the model in training, within limits."""
    if not facts.pairs:
        return 0, facts.why_pairs
    steps = round(min(max(epochs * facts.rows / PAIRS_IN_A_STEP, FEWEST_PAIR_STEPS), MOST_PAIR_STEPS))
    return steps, f"{facts.why_pairs}: that is learned first, from pairs without labels"


def _head_start(config: RunConfig, facts: RunFacts) -> tuple[bool, str]:
    """A fitted head pulls the encoder less: it is for runs that end before a new one has learned anything."""
    if facts.no_head is not None:
        return False, facts.no_head
    rows = config.per_device_train_batch_size or _batch(facts)[0]
    epochs = config.num_train_epochs or epochs_for(facts, rows, config.gradient_accumulation_steps)[0]
    steps = epochs * facts.rows / (rows * config.gradient_accumulation_steps * facts.world)
    steps = config.max_steps if config.max_steps > 0 else steps
    if steps <= FEW_UPDATES:
        return True, f"a new head would learn little in {steps:.0f} updates"
    return False, "a new head lets the encoder learn more"


def _metric(facts: RunFacts) -> Iterator[Decision]:
    """A label that is rare hardly moves accuracy: the checkpoint to keep is chosen by F1."""
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
        f"{rows:,} rows: small batches mean more updates" if size == 8 else f"{rows:,} rows give updates enough"
    )


def epochs_for(facts: RunFacts, batch: int, accumulation: int) -> tuple[float, str]:
    """Passes over the rows, and why."""
    steps = max(1.0, facts.rows / (batch * accumulation * facts.world))
    needed = float(-(-FEWEST_STEPS // steps))
    most = max(MOST_EPOCHS, min(FEW_UPDATES // steps, FEW_ROWS_EPOCHS))
    epochs = min(max(USUAL_EPOCHS, needed), most)
    if epochs > USUAL_EPOCHS:
        return epochs, f"{facts.rows:,} rows need more passes for {steps * epochs:,.0f} updates"
    return epochs, f"{steps * epochs:,.0f} updates are enough"


def _rate(facts: RunFacts) -> tuple[float, str]:
    """Wider models take smaller steps: 1e-4 at width 384, 3.5e-5 at 768, 2.3e-5 at 1024; larger weights take larger ones."""
    width = max(facts.width, 1)
    rate, kind = min(1e-4 * (384 / width) ** 1.5, LARGEST_RATE), ""
    times = facts.matrix_size / (USUAL_SIZE * (384 / width) ** 0.5)
    if facts.model_type.startswith("deberta"):
        rate, kind = rate / 2, f", half of it for {facts.model_type}"
    elif facts.model_type == "modernbert":
        rate, kind = rate * 2, f", twice it for {facts.model_type}"
    elif times > 1:
        rate, kind = rate * min(times, MOST_TIMES), f", and the size of its weights, {times:.1f} times the usual"
    return float(f"{rate:.2g}"), f"by the width of the model, {facts.width}{kind}"
