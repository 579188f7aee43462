"""From a config to everything a run needs: data, tokens, model, strategies, plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.load import DataBundle, load_data
from tunesmith.data.token_rows import TokenRows
from tunesmith.data.tokenize import Tokenized, longest_allowed, tokenize
from tunesmith.errors import ConfigError
from tunesmith.metrics.suite import Suite, make_suite
from tunesmith.model.load import load_model, read_model_config
from tunesmith.model.params import freeze
from tunesmith.model.resolve import resolve_model
from tunesmith.model.tokenizer import load_tokenizer, position_limit
from tunesmith.predict.facts import ModelFacts
from tunesmith.predict.predictor import padding_of
from tunesmith.run.environment import package_versions
from tunesmith.train.checkpoint import Identity
from tunesmith.train.losses import TaskLoss, resolve_class_weights
from tunesmith.train.optim import make_optimizer
from tunesmith.train.runtime import Runtime, make_runtime
from tunesmith.train.seed import make_deterministic, seed_everything
from tunesmith.train.state import TrainState
from tunesmith.train.strategies import Strategies, choose_strategies

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""Called with (what, done, in all)."""

INERT_NAMES = """
    output_dir run_name save_strategy save_steps save_total_limit save_only_model resume_from_checkpoint weights_only
    logging_strategy logging_steps logging_first_step disable_tqdm report_to project preprocessing_num_workers
    overwrite_cache cache_dir allow_changed_data allow_download dataloader_num_workers dataloader_pin_memory
    train_file validation_file test_file test_split_name max_predict_samples model_name_or_path tokenizer_name
    config_name model_revision use_cpu auto_find_batch_size
"""
INERT = frozenset(INERT_NAMES.split())
"""Options that may differ when a run goes on: they change neither data order nor maths (data is compared by content)."""


@dataclass
class Prepared:
    """All that was worked out before the first step. `notes` are sentences for the user."""

    config: RunConfig
    runtime: Runtime
    bundle: DataBundle
    tokenized: dict[str, Tokenized]
    tokenizer: Any
    padding: Padding
    facts: ModelFacts
    suite: Suite
    strategies: Strategies
    state: TrainState
    batches: Batches
    identity: Identity

    def rows(self, split: str) -> TokenRows:
        """The tokenized rows of a split."""
        return self.tokenized[split].rows

    def train_sample(self) -> TokenRows | None:
        """A fixed, seeded sample of the training rows, to be evaluated beside the validation set."""
        wanted = min(self.config.train_sample_size, len(self.rows("train")))
        if wanted <= 0:
            return None
        rng = np.random.default_rng(self.config.seed)
        return self.rows("train").select(np.sort(rng.choice(len(self.rows("train")), wanted, replace=False)))


def prepare(config: RunConfig, *, data: dict[str, Any] | None = None, say: Say, progress: Progress) -> Prepared:
    """Reads, tokenizes and loads. Everything that can be wrong with the input is found here, before the first step."""
    runtime = make_runtime(precision="bf16" if config.bf16 else "fp16" if config.fp16 else "no", use_cpu=config.use_cpu)
    if config.full_determinism:
        make_deterministic()
    folder = resolve_model(
        config.model_name_or_path,
        revision=config.model_revision,
        cache_dir=config.cache_dir,
        allow_download=config.allow_download,
    )
    stored = read_model_config(folder)
    with runtime.main_first():
        bundle = _load_bundle(config, data or {}, progress)
        tokenizer = _load_tokenizer(config, folder)
        length = longest_allowed(tokenizer, model_max=position_limit(stored), asked=config.max_seq_length)
        tokenized = _tokenize(config, bundle, tokenizer, length, stored, progress)
    suite = make_suite(bundle.labels.task, names=config.metric_name, glue_task=config.task_name)
    _check_best_metric(config, suite)
    facts = ModelFacts(
        bundle.labels, bundle.columns.text, bundle.columns.label, length, config.task_name, tuple(suite.names)
    )
    if runtime.is_main:
        for note in (*bundle.notes, *(t.truncated.sentence(s) for s, t in tokenized.items())):
            say(note)
    seed_everything(config.seed)
    loaded = load_model(folder, bundle.labels, ignore_mismatched_sizes=config.ignore_mismatched_sizes)
    padding = padding_of(
        tokenizer,
        multiple_of=config.pad_to_multiple_of,
        fixed_length=length if config.pad_to_max_length else None,
    )
    strategies, state = _make_state(config, loaded.model, bundle, tokenized["train"].rows, padding, runtime)
    if runtime.is_main:
        for note in (*loaded.notes, *strategies.notes):
            say(note)
        if strategies.on:
            say(f"exact speed-ups in use: {', '.join(strategies.on)}")
    batches = _make_batches(config, tokenized["train"].rows, strategies, runtime)
    identity = make_identity(config, bundle, folder, world=runtime.world)
    return Prepared(
        config, runtime, bundle, tokenized, tokenizer, padding, facts, suite, strategies, state, batches, identity
    )


def _load_bundle(config: RunConfig, data: dict[str, Any], progress: Progress) -> DataBundle:
    return load_data(
        train_file=config.train_file,
        validation_file=config.validation_file,
        test_file=config.test_file,
        train_data=data.get("train"),
        validation_data=data.get("validation"),
        test_data=data.get("test"),
        task_name=config.task_name,
        dataset_name=config.dataset_name,
        dataset_config_name=config.dataset_config_name,
        text_column_names=config.text_column_names,
        label_column_name=config.label_column_name,
        label_names=config.label_names,
        do_regression=config.do_regression,
        validation_split_fraction=config.validation_split_fraction,
        seed=config.seed if config.data_seed is None else config.data_seed,
        encoding=config.encoding,
        delimiter=config.delimiter,
        quoting=config.quoting,
        max_train_samples=config.max_train_samples,
        max_eval_samples=config.max_eval_samples,
        max_predict_samples=config.max_predict_samples,
        allow_single_label=config.allow_single_label,
        allow_empty_text=config.allow_empty_text,
        cache_dir=config.cache_dir,
        on_progress=lambda done, total: progress("reading", done, total),
    )


def _load_tokenizer(config: RunConfig, folder: Path) -> Any:
    if config.tokenizer_name is None:
        return load_tokenizer(folder)
    return load_tokenizer(config.tokenizer_name, cache_dir=config.cache_dir, allow_download=config.allow_download)


def _tokenize(
    config: RunConfig, bundle: DataBundle, tokenizer: Any, length: int, stored: dict[str, Any], progress: Progress
) -> dict[str, Tokenized]:
    def report(split: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(f"tokenizing {split}", done, total)

    return {
        split: tokenize(
            dataset,
            tokenizer,
            bundle.columns,
            max_length=length,
            num_proc=config.preprocessing_num_workers,
            cache_dir=config.cache_dir,
            overwrite_cache=config.overwrite_cache,
            vocab_size=stored.get("vocab_size"),
            on_progress=report(split),
        )
        for split, dataset in bundle.splits.items()
    }


def _check_best_metric(config: RunConfig, suite: Suite) -> None:
    name = config.metric_for_best_model
    if name is not None and name != "loss" and name not in suite.names:
        raise ConfigError(
            f"metric_for_best_model {name!r} is not computed; this run computes loss, {', '.join(suite.names)}",
            fix=f"Add it with --metric_name {','.join(suite.names)},{name}.",
        )


def _make_state(
    config: RunConfig, model: Any, bundle: DataBundle, rows: TokenRows, padding: Padding, runtime: Runtime
) -> tuple[Strategies, TrainState]:
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    freeze(model, config.freeze)
    model.to(runtime.device)  # before the strategies: a cut vocabulary keeps its counters where the table is
    strategies = choose_strategies(
        model,
        rows,
        padding,
        device=runtime.device,
        pack_rows=config.padding_free,
        first_token_only=config.cls_only_last_layer,
        restrict_vocabulary=config.restrict_vocabulary,
    )
    labels = bundle.labels
    weights = None
    if config.class_weights is not None:
        assert rows.labels is not None
        weights = resolve_class_weights(config.class_weights, rows.labels, labels.names)
    optimizer = make_optimizer(
        model,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        layerwise_lr_decay=config.layerwise_lr_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        epsilon=config.adam_epsilon,
        fused=config.optim == "adamw_torch_fused",
    )
    objective = TaskLoss(labels.task, len(labels), weights, config.label_smoothing_factor)
    return strategies, TrainState(model, optimizer, objective, runtime, cut=strategies.cut)


def _make_batches(config: RunConfig, rows: TokenRows, strategies: Strategies, runtime: Runtime) -> Batches:
    return Batches(
        rows,
        strategies.train_collate,
        config.per_device_train_batch_size,
        seed=config.seed if config.data_seed is None else config.data_seed,
        accumulation=config.gradient_accumulation_steps,
        sampling=config.train_sampling_strategy,
        shuffle_window=config.shuffle_window,
        token_budget=config.token_budget,
        drop_last=config.dataloader_drop_last,
        rank=runtime.rank,
        world=runtime.world,
    )


def make_identity(config: RunConfig, bundle: DataBundle, folder: Path, *, world: int = 1) -> Identity:
    """What a checkpoint of this run is compared with on resume: options that matter, data by content, model by config."""
    options = {k: _plain(v) for k, v in to_dict(config).items() if k not in INERT}
    options["model"] = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    options["processes"] = world  # each has a batch of its own: another number is another experiment
    text = json.dumps([options, bundle.fingerprint], sort_keys=True)
    run_id = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Identity(run_id, bundle.fingerprint, options, bundle.labels.to_json(), package_versions())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
