"""What makes a run that run: what a checkpoint is compared with when it is resumed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.data.load import DataBundle
from tunesmith.data.order import Sampling
from tunesmith.run.environment import package_versions
from tunesmith.train.checkpoint import Identity
from tunesmith.train.runtime import Precision
from tunesmith.train.sharding_options import Sharding

INERT_NAMES = """
    output_dir run_name save_strategy save_steps save_total_limit save_only_model resume_from_checkpoint weights_only
    logging_strategy logging_steps logging_first_step disable_tqdm report_to project preprocessing_num_workers
    overwrite_cache cache_dir allow_changed_data allow_download dataloader_num_workers dataloader_pin_memory
    train_file validation_file test_file test_split_name max_predict_samples model_name_or_path tokenizer_name
    config_name model_revision use_cpu auto_find_batch_size ddp_timeout
    fsdp fsdp_config
"""
INERT = frozenset(INERT_NAMES.split())
"""Options that may differ when a run goes on: they change neither data order nor maths (data is compared by content)."""


def make_identity(
    config: RunConfig,
    bundle: DataBundle,
    folder: Path,
    *,
    precision: Precision,
    world: int = 1,
    sharding: Sharding | None = None,
) -> Identity:
    """What a checkpoint of this run is compared with on resume: options that matter, data by content, model by config."""
    options = {k: _plain(v) for k, v in to_dict(config).items() if k not in INERT}
    options["model"] = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    options["bf16"] = precision == "bf16"  # asked for, or what the device does by itself
    options["processes"] = world  # each has a batch of its own: another number is another experiment
    if sharding is not None:  # by a flag or by the launcher: sums are taken in another order
        options["fsdp"] = "full_shard" if sharding.reshard_after_forward else "shard_grad_op"
    run_id = _run_id(options, bundle.fingerprint)
    return Identity(run_id, bundle.fingerprint, options, bundle.labels.to_json(), package_versions())


def with_order(identity: Identity, sampling: Sampling) -> Identity:
    """The same with the order of rows, once it is known: what is best depends on model and device."""
    options = {**identity.config, "train_sampling_strategy": sampling}
    return replace(identity, run_id=_run_id(options, identity.data), config=options)


def _run_id(options: dict[str, Any], data: str) -> str:
    return hashlib.sha256(json.dumps([options, data], sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
