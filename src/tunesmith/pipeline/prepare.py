"""The steps of `prepare` in train.py: runtime, model, speedups, training state, batches, plan and identity of a run.

A run is identified by its options and by the content of its data, model and tokenizer, whatever file or name they come from.
Checkpoints and the finished model store that identity. docs/concepts/reliability.md lists its fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig, to_dict
from tunesmith.data.batches import Batches, Padding, Sampling, TokenRows
from tunesmith.data.read import DataBundle
from tunesmith.data.tokenize import Tokenized, padded_fingerprint
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.files import known_hash, read_regular
from tunesmith.inference.model_folder import ModelFacts, read_facts
from tunesmith.labels import LabelMap
from tunesmith.metrics.evidence import BestConstant
from tunesmith.metrics.table import Suite, greater_is_better, make_suite
from tunesmith.models.files import EMBEDDED, read_config_file, read_json_object
from tunesmith.models.load import LoadedModel, load_model
from tunesmith.pipeline.inputs import RunData, RunTokens, load_run_tokenizer, read_run_data
from tunesmith.pipeline.probe import LoadedRun
from tunesmith.pipeline.recipe import Settled
from tunesmith.runs.folder import RunDir, package_versions, read_manifest, verify, verify_results
from tunesmith.speedups.apply import Speedups, apply_speedups, why_not_half
from tunesmith.training.checkpoint import Identity, content_hash_of, differences
from tunesmith.training.distributed import Precision, Runtime, has_bf16, make_runtime
from tunesmith.training.evaluation import TaskLoss, resolve_class_weights
from tunesmith.training.optimizer import freeze, make_optimizer
from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for, warmup_steps_for
from tunesmith.training.state import TrainState, make_deterministic, seed_everything


@dataclass
class Prepared:
    """Everything that is created before the first step."""

    config: RunConfig
    runtime: Runtime
    bundle: DataBundle
    tokenized: dict[str, Tokenized]
    tokenizer: Any
    padding: Padding
    facts: ModelFacts
    suite: Suite
    speedups: Speedups
    state: TrainState
    batches: Batches
    plan: Plan
    identity: Identity
    settled: Settled

    def rows(self, split: str) -> TokenRows:
        """Return the tokenized rows of a split."""
        return self.tokenized[split].rows

    def constant(self) -> BestConstant:
        """Return the constant baseline of the training labels."""
        labels = self.bundle.labels
        return BestConstant.of(labels.task, self.rows("train").labels, len(labels))

    def train_sample(self) -> TokenRows | None:
        """Return a fixed, seeded sample of the training rows, to evaluate with the validation set."""
        wanted = min(self.config.train_sample_size, len(self.rows("train")))
        if wanted <= 0:
            return None
        rng = np.random.default_rng(self.config.seed)
        return self.rows("train").select(np.sort(rng.choice(len(self.rows("train")), wanted, replace=False)))


def start_runtime(config: RunConfig) -> Runtime:
    """Return device, precision and rank; join the other ranks if there are any."""
    if config.full_determinism:
        make_deterministic()
    if config.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        torch.backends.cudnn.allow_tf32 = config.tf32
    precision: Precision = "fp16" if config.fp16 else "no"
    if config.bf16 or (config.bf16 is None and not config.fp16 and has_bf16(use_cpu=config.use_cpu)):
        precision = "bf16"
    return make_runtime(precision=precision, use_cpu=config.use_cpu, timeout_seconds=config.ddp_timeout)


def load_run_model(config: RunConfig, data: RunData, runtime: Runtime) -> tuple[LoadedModel, Runtime, str | None]:
    """Return the model, whose new layers depend only on the seed, and the runtime: in float32, with the reason, if the model
    fails in bf16 and the user didn't set a precision."""
    seed_everything(config.seed)
    loaded = load_model(
        data.folder,
        data.bundle.labels,
        ignore_mismatched_sizes=config.ignore_mismatched_sizes,
        new_head=data.new_head,
        device=runtime.device,
    )
    reason = None if config.bf16 or config.fp16 else why_not_half(loaded.model, runtime)
    return loaded, runtime if reason is None else replace(runtime, precision="no"), reason


def make_run_suite(config: RunConfig, labels: LabelMap) -> Suite:
    """Return the metrics of the run; a ConfigError if the one that selects the checkpoint is not among them."""
    suite = make_suite(
        labels.task, names=config.metric_name, glue_task=config.task_name, positive_name=labels.positive_name
    )
    name = config.metric_for_best_model
    if name is not None and name != "loss" and name not in suite.names:
        raise ConfigError(
            f"metric_for_best_model {name!r} is not computed; this run computes loss, {', '.join(suite.names)}",
            fix=f"Add it with --metric_name {','.join(suite.names)},{name}.",
        )
    return suite


def speed_up(run: LoadedRun) -> Speedups:
    """Freeze what the config names, move the model to its device and apply the speedups that the config allows."""
    config, model = run.config, run.loaded.model
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    freeze(model, config.freeze)
    return apply_speedups(
        run.model,  # on its device: a restricted vocabulary keeps its counters where the table is
        run.splits["train"],
        run.padding,
        device=run.runtime.device,
        pack_rows=config.padding_free,
        first_token_only=config.cls_only_last_layer,
        restrict_vocabulary=config.restrict_vocabulary,
        world=run.runtime.world,
        precision=run.runtime.precision,
        fused_layers=config.fused_layers,
        cuda_graphs=config.cuda_graphs,
    )


def make_state(run: LoadedRun, speedups: Speedups) -> TrainState:
    """Return model, optimizer and loss."""
    config, labels, gold = run.config, run.bundle.labels, run.splits["train"].labels
    weights = None
    if config.class_weights is not None:
        assert gold is not None
        weights = resolve_class_weights(config.class_weights, gold, labels.names)
    model: Any = run.loaded.model
    optimizer = make_optimizer(
        model,
        learning_rate=config.decided.learning_rate,
        weight_decay=config.weight_decay,
        layerwise_lr_decay=config.decided.layerwise_lr_decay,
        head_lr_scale=config.head_lr_scale,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        optim=config.optim,
    )
    objective = TaskLoss(labels.task, len(labels), weights, config.label_smoothing_factor)
    push = config.adversarial
    return TrainState(model, optimizer, objective, run.runtime, push=push, speedups=speedups, only_writer=True)


def make_batches(run: LoadedRun, speedups: Speedups) -> Batches:
    """Return the training batches. Soft labels replace the classes."""
    config, runtime, rows = run.config, run.runtime, run.splits["train"]
    targets, on_gpu = run.bundle.parts["train"].targets(), runtime.device.type == "cuda"
    return Batches(
        rows if targets is None else replace(rows, labels=targets),
        speedups.train_collate,
        config.decided.per_device_train_batch_size,
        seed=config.seed if config.data_seed is None else config.data_seed,
        accumulation=config.gradient_accumulation_steps,
        sampling=config.train_sampling_strategy or speedups.best_order(runtime.device),
        rank=runtime.rank,
        world=runtime.world,
        ahead=2 if on_gpu else 0,
        pinned=on_gpu,
    )


STEPS_A_READ = 16
"""Number of GPU steps whose losses are read together, because reading waits for the device."""
CRASH_INTERVAL = 500
"""Steps between checkpoints within a long epoch: a crash never costs more."""


def make_plan(config: RunConfig, batches: Batches, suite: Suite, *, has_validation: bool, on_gpu: bool = False) -> Plan:
    """Return the plan that the loop follows."""
    steps, ends = epoch_ends_for(
        batches.steps_in_epoch, max_steps=config.max_steps, num_epochs=config.decided.num_train_epochs
    )
    schedule = Schedule(
        config.lr_scheduler_type,
        config.decided.learning_rate,
        warmup_steps_for(config.decided.warmup_steps, steps),
        steps,
    )
    evaluate = _evaluation_calendar(config, steps, ends, has_validation)
    keeps_best = evaluate.cadence != "no" and config.load_best_model_at_end is not False
    metric = config.metric_for_best_model or suite.metric_for_best_model
    return Plan(
        steps,
        ends,
        schedule,
        seed=config.seed,
        max_grad_norm=config.max_grad_norm,
        evaluate=evaluate,
        save=_save_calendar(config, steps, ends, evaluate),
        read_back_every=STEPS_A_READ if on_gpu else 1,
        metric=metric if keeps_best or config.early_stopping_patience is not None else None,
        greater_is_better=greater_is_better(metric),
        patience=config.early_stopping_patience,
    )


def _evaluation_calendar(config: RunConfig, steps: int, ends: tuple[int, ...], has_validation: bool) -> Calendar:
    strategy = config.eval_strategy or ("epoch" if has_validation else "no")
    if strategy != "no" and not has_validation:
        raise ConfigError(
            "--eval_strategy needs validation data",
            fix="Set --validation_file, or a --validation_split_fraction above 0.",
        )
    if strategy == "no":
        return Calendar("no")
    every = _interval(config.evaluation_steps, steps) if strategy == "steps" else 0
    return Calendar(strategy, every, frozenset(ends), steps)


def _save_calendar(config: RunConfig, steps: int, ends: tuple[int, ...], evaluate: Calendar) -> Calendar:
    strategy = config.save_strategy
    if strategy in ("no", "best"):
        return Calendar("no")
    if strategy == "steps":
        return Calendar("steps", _interval(config.save_steps, steps), last=steps)
    if strategy == "epoch":
        return Calendar("epoch", ends=frozenset(ends), last=steps)
    if evaluate.cadence == "steps":
        return Calendar("steps", evaluate.every, last=steps)
    return Calendar("both", CRASH_INTERVAL, frozenset(ends), steps)


def _interval(value: int | float | None, steps: int) -> int:
    """Return a number of steps; a value below 1 is a share of all steps."""
    if value is None:
        return 500
    return max(1, int(steps * value)) if 0 < value < 1 else int(value)


def log_model(run: LoadedRun, speedups: Speedups, why_float32: str | None) -> None:
    """Print model, precision and speedups."""
    config, runtime, log, count = run.config, run.runtime, run.observer.log, run.loaded.parameters
    size = f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"
    log(f"Model: {config.model_name_or_path or EMBEDDED}, {size} parameters, on {runtime.device}.")
    if runtime.precision == "bf16" and config.bf16 is None:
        log("Precision: bf16, because this GPU supports it (weights stay in float32). Set --no_bf16 for float32.")
    if why_float32 is not None:
        log(f"Precision: float32, {why_float32}. Set --bf16 for bf16.")
    if config.train_sampling_strategy is None and speedups.best_order(runtime.device) == "random":
        log("Order: random, because batches have no padding.")
    for note in (*run.loaded.notes, *speedups.notes):
        log(f"{note[0].upper()}{note[1:]}.")
    if speedups.on:
        log(f"Speedups: {', '.join(speedups.on)}.")


INERT_NAMES = """
    output_dir run_name save_strategy save_steps save_total_limit resume_from_checkpoint
    logging_steps disable_tqdm report_to
    cache_dir allow_changed_data
    train_file validation_file test_file test_split_name model_name_or_path tokenizer_name
    model_revision use_cpu ddp_timeout time_budget
    strict_data gold_file labels_file
"""
INERT = frozenset(INERT_NAMES.split())
"""Options that may change when a run is resumed: they affect neither the order of the data nor the math."""
IDLE_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Entries of a model's config.json that don't affect what it computes."""


def make_identity(
    config: RunConfig, data: RunData, tokens: RunTokens, runtime: Runtime, sampling: Sampling
) -> Identity:
    """Return the identity of a run whose options are all decided."""
    options = {name: value for name, value in to_dict(config).items() if name not in INERT}
    options |= {**_content(data), **_tokenizer_content(tokens.tokenizer, tokens.length)}
    options["eval_steps"] = config.evaluation_steps
    options["bf16"] = runtime.precision == "bf16"
    options["processes"] = runtime.world
    options["train_sampling_strategy"] = sampling
    return _identity(options, data.bundle, {**package_versions(), "device": runtime.device.type})


def _tokenizer_content(tokenizer: Any, max_length: int) -> dict[str, str]:
    """Return what a resume compares of a tokenizer: its behavior, and its file, of which transformers ignores some entries."""
    stored = read_json_object(Path(tokenizer.name_or_path) / "tokenizer.json")
    kept = {name: value for name, value in stored.items() if name not in ("version", "truncation", "padding")}
    return {
        "the tokenizer": content_hash_of(padded_fingerprint(tokenizer, max_length)),
        "tokenizer.json": content_hash_of(json.dumps(kept, sort_keys=True)),
    }


def _content(data: RunData) -> dict[str, Any]:
    """Return hashes of data and model, under the names used in messages."""
    bundle, folder = data.bundle, data.folder
    found: dict[str, Any] = {
        f"the {'training' if split == 'train' else split} data": content_hash_of(mark)
        for split, mark in bundle.split_fingerprints.items()
    }
    found["columns"] = [*bundle.columns.text, bundle.columns.label]
    stored = {k: v for k, v in read_config_file(folder).items() if k not in IDLE_CONFIG}
    found["the config of the base model"] = content_hash_of(json.dumps(stored, sort_keys=True))
    weights = sorted(folder.glob("model*.safetensors"))
    found["the weights of the base model"] = content_hash_of(*(f"{p.name} {known_hash(p)}" for p in weights))
    return found


def _identity(options: dict[str, Any], bundle: DataBundle, versions: Mapping[str, str | None]) -> Identity:
    run_id = hashlib.sha256(json.dumps([options, bundle.fingerprint], sort_keys=True).encode()).hexdigest()[:16]
    return Identity(run_id, bundle.fingerprint, options, bundle.labels.to_json(), dict(versions))


def require_same_options(config: RunConfig, file: Path) -> None:
    """Raise a CheckpointError that lists the options that differ from those in `file`, if it exists: the start of these runs."""
    if not file.is_file():
        return
    try:
        if not read_regular(file).strip():
            raise ConfigError("is empty")
        known = to_dict(load_config(file, need_data=False))
    except ConfigError as error:
        fix = "Restore the file, or use a new --output_dir."
        raise CheckpointError(error.problem, where=str(file), fix=fix) from None
    given, free = to_dict(config), INERT | {"seeds"}
    changed = [name for name, value in known.items() if given[name] != value and name not in free]
    if changed:
        raise CheckpointError(
            f"contains runs with a different {', '.join(changed)}",
            where=str(config.run_folder),
            fix="Use the same options, or another --output_dir.",
        )


def require_same_run(config: RunConfig, run: RunDir) -> None:
    """Raise CheckpointError unless the finished run has this config, data, model and tokenizer, and its files are unchanged.

    As in a resumed run, options that the config does not set may have any value.
    """
    verify(run.model)
    verify_results(run)
    with_identity = next((f for f in (run.model, *run.checkpoints()[::-1]) if "config" in read_manifest(f)), run.model)
    stored = read_manifest(with_identity)
    data = read_run_data(config, {}, lambda what, done, total: None)
    length = read_facts(run.model).max_length or 0
    tokenizer = _tokenizer_content(load_run_tokenizer(config, data.folder), length)
    given = {**to_dict(config), "eval_steps": config.evaluation_steps}
    given = {name: value for name, value in given.items() if name not in INERT and value not in (None, "auto")}
    options = {name: value for name, value in stored.get("config", {}).items() if not name.endswith(" data")}
    options |= {**given, **_content(data), **tokenizer}
    changed, _ = differences(with_identity, _identity(options, data.bundle, stored.get("versions", {})))
    if changed:
        raise CheckpointError(
            f"contains a finished run with different settings or data: {'; '.join(changed)}",
            where=str(run.path),
            fix="Set a different --output_dir, or remove the folder to train again.",
        )
