"""The linear probe: how well a linear model on the frozen encoder predicts the labels, before the first training step.

It reads a sample of the training examples. Its results choose the pooling, provide the baselines of the report, initialize the
head of short runs, and serve as evidence in the diagnosis. The second baseline is a linear model on TF-IDF of words and word
pairs: a fine-tuned encoder should beat both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from tunesmith.config.options import RunConfig
from tunesmith.data.batches import Batch, Batches, Padding, TokenRows, evaluation_batches
from tunesmith.data.read import DataBundle
from tunesmith.errors import ConfigError
from tunesmith.events import StepDone
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.calibration import LabelNoise, estimate_label_noise
from tunesmith.metrics.evidence import BestConstant, encode_rows, keep_rows
from tunesmith.metrics.table import Suite
from tunesmith.models.families import Pooling, last_linear, pooled_features, poolings_of
from tunesmith.models.load import LoadedModel
from tunesmith.pipeline.train import PAIR_STAGE, RunObserver
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import Runtime
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

Baselines = dict[str, dict[str, dict[str, Any]]]
"""By split, by name ("frozen features + linear head", "TF-IDF + linear model"), by metric: a score as in metrics.json."""

FEWEST_ROWS = 50
"""With fewer examples, leave-one-out predictions cannot choose between poolings."""
SHARE_OF_ROWS, FEWEST_SEEN, MOST_SEEN = 0.2, 1000, 4000
"""Training examples that the probe reads. One forward pass costs about 1/9 of three epochs: a fifth of the data costs 2%. Fewer
than 1,000 are not enough to estimate the share of wrong labels."""
SHARE_JUDGED, FEWEST_JUDGED, MOST_JUDGED = 0.06, 200, 500
"""Examples of each other split that the baselines are scored on, as a share of the training examples."""
PROBE_ROWS = 400
"""Predictions of the probe that are kept in data_summary.json: about 4 kB."""
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 32_768}


@dataclass(frozen=True)
class LoadedRun:
    """A loaded model and its tokenized data: the inputs of the recipe."""

    config: RunConfig
    loaded: LoadedModel
    bundle: DataBundle
    splits: Mapping[str, TokenRows]
    padding: Padding
    suite: Suite
    runtime: Runtime
    observer: RunObserver

    @property
    def model(self) -> Any:
        """The model, on its device."""
        return self.loaded.model.to(self.runtime.device)

    def texts(self, split: str, rows: npt.NDArray[np.int64]) -> list[str]:
        """Return the texts of some examples; the two texts of a pair are joined."""
        some = self.bundle.splits[split].select(rows)
        columns = [list(some[name]) for name in self.bundle.columns.text]
        return [" ".join(str(cell) for cell in cells) for cells in zip(*columns, strict=True)]


@dataclass(frozen=True)
class ProbeResult:
    """`rows` are the training examples read, ascending; `fits[pooling].held_out[i]` are the logits of example `rows[i]`."""

    rows: npt.NDArray[np.int64]
    fits: Mapping[Pooling, LinearFit]
    pooling: Pooling
    why: str
    baselines: Baselines
    label_noise: LabelNoise | None = None
    """Estimated share of wrong training labels."""

    @property
    def fit(self) -> LinearFit:
        """The linear model of the chosen pooling."""
        return self.fits[self.pooling]

    def evidence(self, train: TokenRows, labels: LabelMap) -> str | None:
        """Return the leave-one-out predictions for training examples, as text for data_summary.json."""
        assert train.labels is not None
        constant = BestConstant.of(labels.task, train.labels, len(labels))
        kept = keep_rows(constant, self.fit.held_out.cpu().numpy(), train.labels[self.rows], PROBE_ROWS)
        return None if kept is None else encode_rows(kept)


def linear_probe(run: LoadedRun) -> ProbeResult | None:
    """Return the result, or None if there are too few examples or some have no label."""
    train, labels = run.splits["train"], run.bundle.labels
    if len(train) < FEWEST_ROWS or train.labels is None or not is_known(train.labels).all():
        return None
    seen = rows_to_see(len(train))
    most = min(max(FEWEST_JUDGED, round(SHARE_JUDGED * len(train))), MOST_JUDGED)
    judged = {name: _some(rows, most) for name, rows in run.splits.items() if name != "train"}
    judged = {name: rows for name, rows in judged.items() if len(rows)}
    progress = partial(run.observer.progress, "linear probe")
    features = frozen_features(run, train.select(seen), progress)
    targets = torch.from_numpy(train.labels[seen])
    fits = {
        pooling: fit_linear(_pooled(run, features, pooling), targets, labels.task, len(labels))
        for pooling in _candidates(run)
    }
    pooling, why = choose_pooling(fits)
    baselines: Baselines = {}
    predicted = [(fits[pooling].held_out.cpu().numpy(), train.labels[seen])]
    by_words = _score_words(run, judged)
    for name, rows in judged.items():
        features = frozen_features(run, run.splits[name].select(rows))
        logits = fits[pooling].logits(_pooled(run, features, pooling).double()).cpu().numpy()
        gold = run.splits[name].labels
        assert gold is not None
        if name == "validation":
            predicted.append((logits, gold[rows]))
        baselines[name] = {
            baseline: {m: s.to_json() for m, s in run.suite.compute_with_intervals(scores, gold[rows]).items()}
            for baseline, scores in (
                ("frozen features + linear head", logits),
                ("TF-IDF + linear model", by_words[name]),
            )
        }
    single = labels.task in (Task.BINARY, Task.MULTICLASS)
    noise = estimate_label_noise(predicted, len(labels)) if single else None
    return ProbeResult(seen, fits, pooling, why, baselines, noise)


def rows_to_see(count: int) -> npt.NDArray[np.int64]:
    """Return which of `count` examples the probe reads; the same in every run."""
    wanted = min(count, max(FEWEST_SEEN, round(SHARE_OF_ROWS * count)), MOST_SEEN)
    return np.sort(np.random.default_rng(0).choice(count, wanted, replace=False))


def is_known(labels: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which examples have a label, or all their labels."""
    known = labels >= 0 if labels.dtype.kind == "i" else np.isfinite(labels)
    return np.asarray(known if known.ndim == 1 else known.all(axis=1))


def _some(rows: TokenRows, most: int) -> npt.NDArray[np.int64]:
    """Return at most this many labeled examples; the same in every run."""
    known = np.flatnonzero(is_known(rows.labels)) if rows.labels is not None else np.zeros(0, dtype=np.int64)
    if len(known) <= most:
        return known
    return np.sort(np.random.default_rng(0).choice(known, most, replace=False))


def _candidates(run: LoadedRun) -> tuple[Pooling, ...]:
    """Return the poolings to compare. A pooler that is not in the checkpoint is a random projection, so it is excluded."""
    possible, fresh = poolings_of(run.loaded.model), run.loaded.fresh
    if not any(name.startswith("classifier") for name in fresh):
        return ("pooler",)  # a trained head reads the vector it was trained on
    new = any("pooler.dense" in name or "classifier.dense" in name for name in fresh)
    return tuple(p for p in possible if p != "pooler" or len(possible) == 1 or not new)


@torch.no_grad()
def _pooled(run: LoadedRun, features: FrozenFeatures, pooling: Pooling) -> torch.Tensor:
    return pooled_features(run.loaded.model, features.first, features.mean, pooling)


def _score_words(run: LoadedRun, judged: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, npt.NDArray[np.float64]]:
    if not judged:
        return {}
    train, labels = run.splits["train"], run.bundle.labels
    assert train.labels is not None
    some = rows_to_see(len(train)) if len(train) > 20 * MOST_SEEN else np.arange(len(train))
    others = [run.texts(name, rows) for name, rows in judged.items()]
    scores = word_scores(run.texts("train", some), train.labels[some], others, labels.task, len(labels))
    return dict(zip(judged, scores, strict=True))


def choose_pooling(fits: Mapping[Pooling, LinearFit]) -> tuple[Pooling, str]:
    """Return the pooling whose linear model is best on held-out rows; the mean unless another one is clearly better."""
    best = min(fits, key=lambda name: float(fits[name].errors.mean()))
    shown = ", ".join(f"{name} {fit.explained:.3f}" for name, fit in fits.items())
    if len(fits) == 1:
        return best, "the only pooling that this model supports"
    if best != "mean" and "mean" in fits:
        gain = fits["mean"].errors - fits[best].errors
        doubt = float(gain.std() / len(gain) ** 0.5)
        if float(gain.mean()) < 2 * doubt:
            return "mean", f"no other pooling is clearly better on frozen features (R2 of held-out rows: {shown})"
    return best, f"best on frozen features (R2 of held-out rows: {shown})"


@dataclass(frozen=True)
class FrozenFeatures:
    """The first token's vector and the mean vector of each example, in half precision's resolution."""

    first: torch.Tensor
    mean: torch.Tensor


def frozen_features(
    run: LoadedRun, rows: TokenRows, progress: Callable[[int, int], None] = lambda done, total: None
) -> FrozenFeatures:
    """Run the encoder without its head, in evaluation mode. The model is not changed."""
    model, runtime, done = run.model, run.runtime, 0
    found: dict[str, torch.Tensor] = {}
    limit = TOKENS_PER_BATCH.get(runtime.device.type, 2048)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), runtime.autocast():
            for batch in evaluation_batches(rows, run.padding, max_tokens=limit):
                moved = runtime.move(batch)
                hidden = model.base_model(**moved.inputs).last_hidden_state.float()
                mask = moved.inputs["attention_mask"].unsqueeze(-1).float()
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
                for name, values in (("first", hidden[:, 0]), ("mean", mean)):
                    store = found.setdefault(name, torch.empty(len(rows), values.shape[-1], device=values.device))
                    store[torch.from_numpy(batch.rows).to(values.device)] = values.half().float()
                done += len(batch)
                progress(done, len(rows))
    finally:
        model.train(was_training)
    return FrozenFeatures(found["first"], found["mean"])


def start_head(run: LoadedRun) -> None:
    """Initialize the last layer with a linear model of its inputs, the same on all ranks."""
    model, rows = run.model, run.splits["train"]
    head = None
    if run.runtime.is_main:
        rows = rows.select(rows_to_see(len(rows)))
        assert rows.labels is not None
        rows = rows.select(np.flatnonzero(is_known(rows.labels)))
        head = _fit_head(_inputs_of_head(run, rows), rows.labels, run.bundle.labels)
    layer = last_linear(model)
    with torch.no_grad():
        for old, new in zip((layer.weight, layer.bias), run.runtime.gather_objects(head)[0], strict=True):
            old.copy_(torch.from_numpy(new))


def _inputs_of_head(run: LoadedRun, rows: TokenRows) -> torch.Tensor:
    """Return the input of the last layer for each example. The model is in training mode afterwards."""
    model, runtime = run.model, run.runtime
    layer = last_linear(model)
    found = torch.empty(len(rows), layer.in_features, device=runtime.device)
    kept: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    model.eval()
    try:
        with torch.no_grad(), runtime.autocast():
            for batch in evaluation_batches(rows, run.padding, max_rows=64):
                model(**runtime.move(batch).inputs)
                found[torch.from_numpy(batch.rows).to(found.device)] = kept.pop().float()
    finally:
        hook.remove()
    model.train()
    return found


def _fit_head(read: torch.Tensor, gold: Any, labels: LabelMap) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    known = torch.from_numpy(gold).to(read.device)
    if labels.task in (Task.BINARY, Task.MULTICLASS):
        weights, bias = fit_logistic(read, known, len(labels))
    else:
        fit = fit_linear(read, known, labels.task, len(labels))
        weights, bias = fit.weights, fit.bias
    return weights.float().cpu().numpy(), bias.float().cpu().numpy()


PENALTIES = tuple(10.0**power for power in (-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1))
"""As shares of the features' largest variance: from nearly none to one under which all predictions are the mean."""


@dataclass(frozen=True)
class LinearFit:
    """`features @ weights.T + bias` are logits (the value itself for regression). `held_out[i]` are the logits of row i by a
    model that has not seen row i; `errors[i]` is the squared error of that row before scaling, `explained` their R2."""

    weights: torch.Tensor
    bias: torch.Tensor
    held_out: torch.Tensor
    errors: torch.Tensor
    explained: float

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits of other rows."""
        return features.to(self.weights) @ self.weights.T + self.bias


def fit_linear(features: torch.Tensor, labels: torch.Tensor, task: Task, classes: int) -> LinearFit:
    """Fits all classes together, with the penalty that has the smallest leave-one-out error."""
    x, y = features.double(), targets_of(labels, task, classes).to(features.device)
    center, means = x.mean(0), y.mean(0)
    x, y = x - center, y - means
    values, vectors = torch.linalg.eigh(x.T @ x)
    values = values.clamp_min(0)
    rotated = x @ vectors
    products = rotated.T @ y
    squares = rotated.square()
    best: tuple[float, torch.Tensor, torch.Tensor] | None = None
    for share in PENALTIES:
        inverse = 1 / (values + share * float(values[-1]) + 1e-12)
        leverage = (squares @ inverse + 1 / len(x)).clamp_max(1 - 1e-6)
        left_out = (y - rotated @ (inverse[:, None] * products)) / (1 - leverage[:, None])
        error = float(left_out.square().mean())
        if best is None or error < best[0]:
            best = (error, left_out, inverse)
    assert best is not None
    error, left_out, inverse = best
    weights = (vectors @ (inverse[:, None] * products)).T
    scores = y - left_out + means
    variance = float(y.square().mean())
    scale, shift = fit_scale(scores, y + means, task)
    bias = scale * (means - weights @ center) + shift
    explained = 1 - error / variance if variance > 0 else 0.0
    return LinearFit(scale * weights, bias, scale * scores + shift, left_out.square().mean(1), explained)


PENALTY = 1.5
"""Penalty of a logistic model, in mean squared lengths of the features. Smaller ones were worse (docs/research/recipes.md)."""


def fit_logistic(features: torch.Tensor, labels: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and bias of logistic regression with a fixed penalty, because few rows can't select one."""
    x, y = features.double(), labels.long()
    penalty = PENALTY * float(x.square().sum(1).mean())

    def loss(free: torch.Tensor) -> torch.Tensor:
        logits = x @ free[:, :-1].T + free[:, -1]
        return functional.cross_entropy(logits, y, reduction="sum") + penalty / 2 * free[:, :-1].square().sum()

    found = minimize(loss, torch.zeros(classes, x.shape[1] + 1, dtype=torch.double, device=x.device))
    return found[:, :-1], found[:, -1]


def minimize(loss: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """Return where a smooth convex function is smallest."""
    free = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(free)
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return free.detach()


def targets_of(labels: torch.Tensor, task: Task, classes: int) -> torch.Tensor:
    """Return the targets of a linear model: the value, or a column of zeros and ones for each label."""
    if task is Task.REGRESSION:
        return labels.double().reshape(-1, 1)
    if task is Task.MULTILABEL:
        return labels.double()
    return torch.nn.functional.one_hot(labels.long(), classes).double()


PULL = 0.1
"""Penalty toward scale 1 and no shift, so that few rows or perfectly separated classes have finite logits."""


def fit_scale(scores: torch.Tensor, targets: torch.Tensor, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a scale, and a shift for each class, that maximize the likelihood of held-out scores as logits."""
    start = torch.zeros(scores.shape[1] + 1, dtype=torch.double, device=scores.device)
    start[0] = 1.0
    if task is Task.REGRESSION:
        return start[0], start[1:]
    by_label = functional.binary_cross_entropy_with_logits if task is Task.MULTILABEL else functional.cross_entropy

    def loss(free: torch.Tensor) -> torch.Tensor:
        logits = free[0] * scores + free[1:]
        return by_label(logits, targets, reduction="sum") + PULL / 2 * (free - start).square().sum()

    found = minimize(loss, start)
    return found[0].clamp_min(0.0), found[1:]


MOST_ROWS = 10_000
"""Maximum number of training rows; more hardly improve a model of words."""


def word_scores(
    train: Sequence[str], labels: npt.NDArray[Any], others: Sequence[Sequence[str]], task: Task, classes: int
) -> list[npt.NDArray[np.float64]]:
    """Return scores (rows, classes) of each list of held-out texts; in regression the value. Fitted on the training texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    known = np.flatnonzero(labels >= 0) if labels.dtype.kind == "i" else np.arange(len(labels))
    known = known[:MOST_ROWS]
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), max_features=200_000, token_pattern=r"(?u)\b\w+\b")
    try:
        table = words.fit_transform([train[int(i)] for i in known])
    except ValueError:  # not one word in any text
        return [np.zeros((len(texts), classes)) for texts in others]
    targets = labels[known] if labels.ndim == 2 or task is Task.REGRESSION else np.eye(classes)[labels[known]]
    fitted = Ridge(alpha=1.0, solver="sparse_cg", tol=1e-3).fit(table, np.asarray(targets, dtype=np.float64))
    found = []
    for texts in others:
        scores = fitted.predict(words.transform(texts)).reshape(len(texts), -1)
        # Half the way between no and yes is where a logit changes its sign.
        found.append(scores if task is Task.REGRESSION else 4.0 * (scores - 0.5))
    return found


# --- pair warm-up -----------------------------------------------------------------------------------------------------

# The pair warm-up: before training on text pairs, distill the frozen encoder's separate text embeddings into the pair
# model. Sentence encoders are trained to embed one text at a time, but a pair classifier reads both texts together and
# cannot use that similarity. The warm-up teaches the joint model the pairwise features of the separate embeddings
# (absolute difference, product, cosine). It uses no labels: pairs are made of the texts of the training examples. The
# steps are ordinary training steps; a checkpoint contains their result, so a resumed run does not repeat them.

PAIRS_IN_A_STEP = 32
MOST_READ = 4000
"""Maximum number of examples from which pairs are made."""
MOST_PAIRS = 40_000
REAL, NEAR, NEAREST = 0.25, 0.4, 12
"""Shares of pairs that are real examples, and of pairs of a text with one of its nearest neighbors; the rest is random."""


@dataclass(frozen=True)
class PairReadings:
    """`vectors[side][i]`: the embedding, of length 1, of the text `texts.sides[side][i]`."""

    texts: PairTexts
    vectors: tuple[torch.Tensor, torch.Tensor]


def read_pairs(run: LoadedRun) -> tuple[PairReadings | None, str]:
    """Return the separate embeddings of the training texts, and what they say about the labels; None, and why, if impossible."""
    try:
        last_linear(run.model)
    except ConfigError as error:
        return None, error.problem
    return read_alone(run.splits["train"], run.bundle.labels, partial(frozen_features, run))


def read_alone(
    rows: TokenRows, labels: LabelMap, read: Callable[[TokenRows], FrozenFeatures]
) -> tuple[PairReadings | None, str]:
    """Embed both texts of at most MOST_READ examples, pooled as the labels prefer, or as a mean if that is unclear.

    How well the embeddings explain the labels does not decide whether they are used: the warm-up also gained if they explained
    nothing, and cost at most half a point anywhere (docs/research/recipes.md).
    """
    drawn = np.random.default_rng(0).choice(len(rows), min(len(rows), MOST_READ), replace=False)
    some = rows.select(np.sort(drawn))
    texts = PairTexts.of(some)
    if texts is None or some.labels is None:
        return None, "some examples have only one text"
    sides = [read(texts.alone(side)) for side in (0, 1)]
    vectors: dict[Pooling, tuple[torch.Tensor, torch.Tensor]] = {name: _unit(sides, name) for name in ("mean", "first")}
    known = np.flatnonzero(is_known(some.labels))
    if len(known) < FEWEST_ROWS:
        return PairReadings(texts, vectors["mean"]), "the examples are text pairs"
    gold = torch.from_numpy(some.labels[known])
    fits = {
        name: fit_linear(compare_sides(u[known], v[known]), gold, labels.task, len(labels))
        for name, (u, v) in vectors.items()
    }
    pooling, _ = choose_pooling(fits)
    explained = f"R2 of held-out examples {fits[pooling].explained:.2f} from separate text embeddings"
    return PairReadings(texts, vectors[pooling]), explained


def warm_up_on_pairs(run: LoadedRun, readings: PairReadings, *, steps: int, learning_rate: float) -> None:
    """Train the model in place; its last layer is restored afterwards."""
    model, seed = run.model, run.config.seed
    pairs = make_pairs(readings, min(PAIRS_IN_A_STEP * steps, MOST_PAIRS), seed)
    assert pairs.labels is not None
    layer, width = last_linear(model), pairs.labels.shape[1]
    own = layer.weight, layer.bias
    made = torch.randn(width, layer.in_features, generator=torch.Generator().manual_seed(seed)) * 0.02
    layer.weight = nn.Parameter(made.to(own[0]))
    layer.bias = nn.Parameter(torch.zeros(width).to(own[0]))
    try:
        _take_steps(run, pairs, steps, learning_rate)
    finally:
        layer.weight, layer.bias = own


def _take_steps(run: LoadedRun, pairs: TokenRows, steps: int, learning_rate: float) -> None:
    model, runtime, seed = run.model, run.runtime, run.config.seed
    speedups = apply_speedups(model, pairs, run.padding, device=runtime.device, precision=runtime.precision)
    order = speedups.best_order(runtime.device)
    on_gpu = runtime.device.type == "cuda"
    batches = Batches(
        pairs, speedups.train_collate, PAIRS_IN_A_STEP, seed=seed, sampling=order, ahead=2 * on_gpu, pinned=on_gpu
    )
    count, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=steps, num_epochs=0)
    plan = Plan(count, ends, Schedule("linear", learning_rate, count // 10, count), seed=seed)
    optimizer = make_optimizer(model, learning_rate=learning_rate)
    state = TrainState(model, optimizer, PairLoss(), runtime, speedups=speedups, only_writer=True)
    for event in train_events(state, batches, plan):
        if isinstance(event, StepDone):
            run.observer.progress(PAIR_STAGE, event.step, count)
            if event.step == run.observer.start_steps:
                break
    speedups.close()


class PairLoss:
    """The mean squared error of the pairwise features; the cosine counts as much as all others together."""

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss and the predicted features."""
        found = model(**batch.inputs).logits
        assert batch.labels is not None
        errors = (found.float() - batch.labels).square()
        return errors[:, -1].sum() + errors[:, :-1].mean(1).sum(), found

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """Return the number of pairs."""
        return float(rows)


def _unit(sides: Sequence[FrozenFeatures], name: Pooling) -> tuple[torch.Tensor, torch.Tensor]:
    u, v = (functional.normalize(getattr(side, name).float(), dim=1) for side in sides)
    return u, v


def make_pairs(readings: PairReadings, count: int, seed: int) -> TokenRows:
    """Return rows of two texts whose labels are features of their separate embeddings, with mean 0 and variance 1."""
    u, v = readings.vectors
    rng, rows = np.random.default_rng(seed), len(u)
    near = (u @ v.T).topk(min(NEAREST, rows), dim=1).indices.cpu().numpy()
    first, kind = rng.integers(rows, size=count), rng.random(count)
    second = np.where(kind < REAL, first, rng.integers(rows, size=count))
    close = (kind >= REAL) & (kind < REAL + NEAR)
    second[close] = near[first, rng.integers(near.shape[1], size=count)][close]
    values = compare_sides(u[first], v[second])
    values = (values - values.mean(0)) / values.std(0).clamp_min(1e-6)
    return readings.texts.together(first.tolist(), second.tolist(), values.cpu().numpy())


def compare_sides(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return features of two embeddings: distance and product in each dimension, and last their cosine."""
    return torch.cat([(u - v).abs(), u * v, (u * v).sum(1, keepdim=True)], 1)


@dataclass(frozen=True)
class PairTexts:
    """The texts of rows in token ids, without special ones: `sides[0][i]` and `sides[1][i]` are those of row i."""

    sides: tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]
    start: int
    end: int
    between: int
    """How often `end` stands between two texts."""
    second_type: int | None
    """The token type of the second text."""
    longest: int

    @classmethod
    def of(cls, rows: TokenRows) -> PairTexts | None:
        """Return the texts; None unless every row is: start, a text, end, a text, end."""
        whole = rows.columns["input_ids"].take(np.arange(len(rows)))
        start, end = int(whole[0][0]), int(whole[0][-1])
        inner = [np.flatnonzero(ids[1:-1] == end) for ids in whole]
        if not all(len(at) and ids[0] == start and ids[-1] == end for ids, at in zip(whole, inner, strict=True)):
            return None
        twice = all(len(at) > 1 and at[1] == at[0] + 1 for at in inner)
        cuts = [int(at[0]) + 1 for at in inner]
        sides = (
            [ids[1:cut] for ids, cut in zip(whole, cuts, strict=True)],
            [ids[cut + 1 + twice : -1] for ids, cut in zip(whole, cuts, strict=True)],
        )
        types = rows.columns.get("token_type_ids")
        second = None if types is None else int(types.take(np.arange(1))[0][-1])
        return cls(sides, start, end, 1 + twice, second, int(rows.lengths.max()))

    def alone(self, side: int) -> TokenRows:
        """Return one text of each row, as a row."""
        ids = [[self.start, *text, self.end] for text in self.sides[side]]
        types = {} if self.second_type is None else {"token_type_ids": [[0] * len(row) for row in ids]}
        return TokenRows.from_lists({"input_ids": ids, **types})

    def together(self, first: Sequence[int], second: Sequence[int], values: npt.NDArray[np.float32]) -> TokenRows:
        """Return rows with the first text of one row and the second of another. No row is longer than the originals."""
        room = self.longest - 2 - self.between
        rows, types = list[list[int]](), list[list[int]]()
        for i, j in zip(first, second, strict=True):
            a, b = self.sides[0][i], self.sides[1][j]
            a = a[: max(room - len(b), room // 2)]
            b = b[: room - len(a)]
            rows.append([self.start, *a, *[self.end] * self.between, *b, self.end])
            head = 1 + len(a) + self.between
            types.append([0] * head + [self.second_type or 0] * (len(rows[-1]) - head))
        made: dict[str, Any] = {"input_ids": rows, "labels": values}
        return TokenRows.from_lists(made if self.second_type is None else {**made, "token_type_ids": types})
