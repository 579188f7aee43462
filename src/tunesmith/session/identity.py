"""What makes a run that run: what a checkpoint is compared with when it is resumed. docs/reliability.md lists it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.encoder.config_file import read_config_file
from tunesmith.keep.checkpoint import Identity, content_mark
from tunesmith.ranks.runtime import Runtime
from tunesmith.reading.load import DataBundle
from tunesmith.run.environment import package_versions
from tunesmith.run.remembered import known_hash
from tunesmith.tokens.token_encoder import padded_fingerprint
from tunesmith.tokens.token_rows import Sampling

INERT_NAMES = """
    output_dir run_name save_strategy save_steps save_total_limit save_only_model resume_from_checkpoint weights_only
    logging_strategy logging_steps logging_first_step disable_tqdm report_to project preprocessing_num_workers
    overwrite_cache cache_dir allow_changed_data allow_download dataloader_num_workers dataloader_pin_memory
    train_file validation_file test_file test_split_name max_predict_samples model_name_or_path tokenizer_name
    config_name model_revision use_cpu auto_find_batch_size ddp_timeout time_budget
    fsdp fsdp_config strict_data labels_file
"""
INERT = frozenset(INERT_NAMES.split())
"""Options that may differ when a run is resumed: they change neither data order nor maths. Data, model and tokenizer are
compared by content, whatever file or name they come from."""
IDLE_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Entries of a model's config.json that say where it comes from, not what it computes."""


def make_identity(
    config: RunConfig, bundle: DataBundle, folder: Path, tokenizer: Any, *, max_length: int, runtime: Runtime
) -> Identity:
    """What a checkpoint of this run is compared with on resume: options that matter; data, model and tokenizer by content."""
    options = {k: _plain(v) for k, v in to_dict(config).items() if k not in INERT}
    options |= {_name_of(split): content_mark(found) for split, found in bundle.split_fingerprints.items()}
    options["columns"] = [*bundle.columns.text, bundle.columns.label]
    options["the tokenizer"] = content_mark(padded_fingerprint(tokenizer, max_length))
    stored = {k: v for k, v in read_config_file(folder).items() if k not in IDLE_CONFIG}
    options["the config of the base model"] = content_mark(json.dumps(stored, sort_keys=True))
    weights = sorted(folder.glob("model*.safetensors"))
    options["the weights of the base model"] = content_mark(*(f"{p.name} {known_hash(p)}" for p in weights))
    options["eval_steps"] = config.evaluation_steps
    options["bf16"] = runtime.precision == "bf16"  # asked for, or what the device does by itself
    options["processes"] = runtime.world  # each has a batch of its own: another number is another experiment
    if runtime.sharding is not None:  # by a flag or by the launcher: sums are taken in another order
        options["fsdp"] = "full_shard" if runtime.sharding.reshard_after_forward else "shard_grad_op"
    versions = {**package_versions(), "device": runtime.device.type}
    return Identity(
        _run_id(options, bundle.fingerprint), bundle.fingerprint, options, bundle.labels.to_json(), versions
    )


def with_order(identity: Identity, sampling: Sampling) -> Identity:
    """The same with the order of rows, once it is known: what is best depends on model and device."""
    options = {**identity.config, "train_sampling_strategy": sampling}
    return replace(identity, run_id=_run_id(options, identity.data), config=options)


def _name_of(split: str) -> str:
    return f"the {'training' if split == 'train' else split} data"


def _run_id(options: dict[str, Any], data: str) -> str:
    return hashlib.sha256(json.dumps([options, data], sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
