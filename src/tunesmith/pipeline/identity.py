"""What a run is made from, whether it is finished, and which folder it uses.

A run is identified by its options and by the content of its data, model and tokenizer, whatever file or name they come from.
Checkpoints and the finished model store that identity. docs/concepts/reliability.md lists its fields.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.load import REMOVED_DEFAULTS, load_config
from tunesmith.config.options import RunConfig, to_dict
from tunesmith.data.read import DataBundle
from tunesmith.data.tokenize import padded_fingerprint
from tunesmith.errors import CheckpointError, TunesmithError
from tunesmith.files import known_hash
from tunesmith.inference.model_folder import read_facts
from tunesmith.models.files import read_config_file, read_json_object
from tunesmith.pipeline.inputs import RunData, load_run_tokenizer, read_run_data
from tunesmith.runs.folder import RunDir, end_of, is_run, package_versions, verify_results
from tunesmith.runs.manifest import read_manifest, verify

if TYPE_CHECKING:
    from tunesmith.data.batches import Sampling
    from tunesmith.training.checkpoint import Identity
    from tunesmith.training.distributed import Runtime

INERT_NAMES = """
    output_dir run_name save_strategy save_steps save_total_limit resume_from_checkpoint
    logging_steps disable_tqdm report_to preprocessing_num_workers
    cache_dir allow_changed_data allow_download
    train_file validation_file test_file test_split_name model_name_or_path tokenizer_name
    model_revision use_cpu ddp_timeout time_budget
    strict_data labels_file
"""
INERT = frozenset(INERT_NAMES.split())
"""Options that may change when a run is resumed: they affect neither the order of the data nor the math."""
IDLE_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Entries of a model's config.json that say where it comes from, not what it computes."""
NOT_COMPARED = frozenset(
    ["output_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "logging_steps", "cache_dir"]
)
"""Options that do not change the experiment."""


def make_identity(
    config: RunConfig, data: RunData, tokenizer: Mapping[str, str], runtime: Runtime, sampling: Sampling
) -> Identity:
    """Return the identity of a run whose options are all decided. `tokenizer`: see `tokenizer_content`."""
    options = {name: value for name, value in {**REMOVED_DEFAULTS, **to_dict(config)}.items() if name not in INERT}
    options |= {**_content(data), **tokenizer}
    options["eval_steps"] = config.evaluation_steps
    options["bf16"] = runtime.precision == "bf16"
    options["processes"] = runtime.world
    options["train_sampling_strategy"] = sampling
    return _identity(options, data.bundle, {**package_versions(), "device": runtime.device.type})


def tokenizer_content(tokenizer: Any, max_length: int) -> dict[str, str]:
    """Return what is compared of a tokenizer: how it tokenizes, and its file, of which transformers ignores some entries."""
    from tunesmith.training.checkpoint import TOKENIZER_FILE, content_hash_of

    stored = read_json_object(Path(tokenizer.name_or_path) / TOKENIZER_FILE)
    kept = {name: value for name, value in stored.items() if name not in ("version", "truncation", "padding")}
    return {
        "the tokenizer": content_hash_of(padded_fingerprint(tokenizer, max_length)),
        TOKENIZER_FILE: content_hash_of(json.dumps(kept, sort_keys=True)),
    }


def _content(data: RunData) -> dict[str, Any]:
    """Data and model of a run by their content, under the names that a user is shown."""
    from tunesmith.training.checkpoint import content_hash_of

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
    from tunesmith.training.checkpoint import Identity

    run_id = hashlib.sha256(json.dumps([options, bundle.fingerprint], sort_keys=True).encode()).hexdigest()[:16]
    return Identity(run_id, bundle.fingerprint, options, bundle.labels.to_json(), dict(versions))


def require_same_run(config: RunConfig, run: RunDir) -> None:
    """Raise CheckpointError unless the finished run has this config, data, model and tokenizer, and its files are unchanged.

    As in a resumed run, options that the config does not set may have any value.
    """
    from tunesmith.training.checkpoint import differences

    verify(run.model)
    verify_results(run)
    with_identity = next((f for f in (run.model, *run.checkpoints()[::-1]) if "config" in read_manifest(f)), run.model)
    stored = read_manifest(with_identity)
    data = read_run_data(config, {}, lambda what, done, total: None)
    length = read_facts(run.model, read_config_file(run.model)).max_length or 0
    tokenizer = tokenizer_content(load_run_tokenizer(config, data.folder), length)
    given = {**to_dict(config), "eval_steps": config.evaluation_steps}
    given = {name: value for name, value in given.items() if name not in INERT and value not in (None, "auto")}
    options = {**stored.get("config", {}), **given, **_content(data), **tokenizer}
    changed, _ = differences(with_identity, _identity(options, data.bundle, stored.get("versions", {})))
    if changed:
        raise CheckpointError(
            f"contains a finished run that was started with something else: {'; '.join(changed)}",
            where=str(run.path),
            fix="Set a different --output_dir, or remove the folder to train again.",
        )


def is_finished(run: RunDir) -> bool:
    """Whether the run completed: its event log says so, and its model and report are there."""
    return end_of(run) is not None


def choose_folder(config: RunConfig, *, in_memory: bool = False) -> tuple[RunConfig, str | None]:
    """Return the config with its run folder, and a message if it is not the usual one.

    With an output_dir, a finished run there is refused before anything loads. Without one, a folder that contains a run with
    different settings is skipped, and so is a finished run on data in memory, which no config names.
    """
    if config.resume_from_checkpoint:
        return config, None
    if config.output_dir is not None:
        _refuse_finished(config, RunDir(config.run_folder))
        return config, None
    first = config.run_folder
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        run = RunDir(folder)
        if not os.path.isfile(run.config_file):  # False for a name that no file can have
            break
        same = _has_same_settings(config, run)
        if same and not is_finished(run):
            break
        if same and not in_memory:
            _refuse_finished(config, run)
    if number == 1:
        return config, None
    note = f"{first} contains a run with different settings or data: this run is written to {folder}."
    return replace(config, output_dir=str(folder)), note


def _refuse_finished(config: RunConfig, run: RunDir) -> None:
    if is_finished(run):
        raise finished_error(run, same=run.config_file.is_file() and _has_same_settings(config, run))


def finished_error(run: RunDir, *, same: bool) -> CheckpointError:
    """The error for a folder whose run must not be overwritten."""
    return CheckpointError(
        f"contains a finished run of {'this' if same else 'a different'} config",
        where=str(run.path),
        fix="Set a different --output_dir or --run_name, or remove the folder to train again."
        + ("" if run.report_file.exists() else f" `tunesmith report {run.path}` writes its report."),
    )


def _has_same_settings(config: RunConfig, run: RunDir) -> bool:
    try:
        stored = load_config(run.config_file, need_data=False)
    except TunesmithError:
        return True  # damaged: the run itself decides about the folder
    asked, there, usual = _compared(config), _compared(stored), _compared(RunConfig())
    # run.yaml contains the values that the recipe chose: an option that is not set is not a difference.
    return all(value in (there[name], usual[name]) for name, value in asked.items())


def _compared(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in to_dict(config).items() if name not in NOT_COMPARED}


def free_folder(folder: Path) -> Path:
    """Return the folder, or folder-2, folder-3, ...: the first that is new, empty or contains an unfinished run."""

    def is_free(name: Path) -> bool:
        if not os.path.lexists(name) or (name.is_dir() and not any(name.iterdir())):
            return True
        return is_run(RunDir(name)) and not RunDir(name).report_file.exists()

    names = (folder.with_name(f"{folder.name}-{n}") if n > 1 else folder for n in count(1))
    return next(filter(is_free, names))
