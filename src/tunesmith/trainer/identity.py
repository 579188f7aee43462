"""The identity of a Trainer's run: a resume compares it with the checkpoint's before the first step.

Data, model, tokenizer and arguments that change the weights must be equal. Library versions and evaluation data may differ,
and are reported. The script's own code is not compared.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

from tunesmith.models.families import has_adapters
from tunesmith.runs.folder import package_versions
from tunesmith.training.checkpoint import Identity, content_hash_of

ARGUMENTS = """
    seed data_seed train_sampling_strategy dataloader_drop_last length_column_name ignore_data_skip
    remove_unused_columns learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args
    optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor
    neftune_noise_alpha average_tokens_across_devices bf16 fp16 tf32 torch_compile use_liger_kernel label_names
""".split()  # noqa: SIM905
"""Arguments that change the weights: a resume with a different value is refused."""
BATCH = "the batch size of a step"
REPORTED = ("num_train_epochs", "max_steps", "metric_for_best_model", "greater_is_better")
"""Arguments that a script may change to train longer or to evaluate differently; a change, also of `BATCH`, is reported."""
IDLE_CONFIG = ("architectures", "dtype", "torch_dtype", "transformers_version", "problem_type", "id2label", "label2id")
"""Entries of a model's config that change by loading, saving or the first batch; labels are compared separately."""
DEEPEST = 8


def trainer_identity(trainer: Any, dataset: Any, model: str, run_id: str) -> Identity:
    """Return the identity of a run. `dataset` is the one the loader reads; `model` is the model's fingerprint."""
    args, collator, data = trainer.args, trainer.data_collator, content_of(dataset)
    config: dict[str, Any] = {
        **{name: _plain(getattr(args, name)) for name in ARGUMENTS if hasattr(args, name)},
        "the training data": content_hash_of(data),
        "the model": model,
        "adapters": has_adapters(trainer.model),
        "the collator": content_hash_of(settings_of(collator)),
        "the tokenizer": tokenizer_mark(trainer.processing_class or getattr(collator, "tokenizer", None)),
    }
    labels = getattr(getattr(trainer.model, "config", None), "id2label", None) or {}
    names = {"names": [str(labels[k]) for k in sorted(labels)]}
    return Identity(run_id, data, config, names, {**package_versions(), **_reported(trainer)})


def _reported(trainer: Any) -> dict[str, str | None]:
    """Return what may differ but is reported: length, evaluation and device."""
    marks = {name: str(getattr(trainer.args, name)) for name in REPORTED}
    if str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) != "no":
        marks["the evaluation data"] = content_hash_of(content_of(trainer.eval_dataset))
    marks[BATCH] = f"{trainer._train_batch_size * trainer.args.gradient_accumulation_steps * trainer.args.world_size}"
    return {**marks, "device": trainer.args.device.type, "python": platform.python_version()}


def model_mark(model: Any) -> str:
    """Return a hash of what a model computes, without its weights, which are in the checkpoint."""
    config: Any = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    kept = {k: v for k, v in settings.items() if k not in IDLE_CONFIG and not k.startswith("_")}
    modules = [f"{n} {type(m).__name__}({m.extra_repr()})" for n, m in model.named_modules()]
    weights = [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]
    frozen = [_frozen_content(model)] if has_adapters(model) else []  # a checkpoint of adapters has no other weights
    text = json.dumps([kept, modules, weights, *frozen], sort_keys=True, default=str)
    return content_hash_of(re.sub(r" at 0x[0-9a-f]+", "", text))


def _frozen_content(model: Any) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_mark(processor: Any) -> str | None:
    """Return a hash of the settings of a tokenizer or processor; None if it has none that can be read."""
    if isinstance(processor, PreTrainedTokenizerBase):
        names = ("pad_token_id", "pad_token_type_id", "padding_side", "truncation_side", "model_input_names")
        settings = [getattr(processor, name, None) for name in (*names, "do_lower_case", "all_special_tokens")]
        backend = getattr(processor, "backend_tokenizer", None)
        rules: Any = json.loads(backend.to_str()) if backend is not None else sorted(processor.get_vocab().items())
        if isinstance(rules, dict):  # padding and truncation change by calls
            rules = {k: v for k, v in rules.items() if k not in ("padding", "truncation")}
        return content_hash_of(json.dumps([settings, rules], sort_keys=True, default=str))
    return content_hash_of(processor.to_json_string()) if hasattr(processor, "to_json_string") else None


def _plain(value: Any) -> Any:
    plain = value.value if isinstance(value, Enum) else value
    simple = isinstance(plain, (str, int, float, bool, type(None)))
    return plain if simple else json.loads(json.dumps(plain, default=str))


def content_of(dataset: Any, depth: int = 0) -> str:
    """Return a hash of all that a dataset has in memory or in Arrow files; for a stream, of its kind only.

    Arrow: every cell of every row, in order, with the format. A list: every row. Any other dataset: its length, and each
    attribute that has a value for every row or is a dataset itself.
    """
    digest = hashlib.sha256(type(dataset).__qualname__.encode())
    if dataset is None or depth > DEEPEST:
        return ""
    if isinstance(dataset, Mapping):
        digest.update(repr(sorted((str(name), content_of(part, depth + 1)) for name, part in dataset.items())).encode())
        return digest.hexdigest()
    if not has_length(dataset):
        return "stream"
    digest.update(f"{len(dataset)} rows".encode())
    if is_arrow_dataset(dataset):
        form = dataset.format
        digest.update(f"{form['type']} {sorted(map(str, form['columns']))}".encode())
        if dataset.column_names:
            digest.update(_arrow_content(dataset).encode())
    elif isinstance(dataset, (list, tuple)):
        digest.update(_rows_mark(dataset))
    else:
        for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
            found = _attribute_mark(value, len(dataset), depth)
            if found:
                digest.update(name.encode() + found)
    return digest.hexdigest()


def _arrow_content(dataset: Any) -> str:
    """Hash an Arrow dataset. With indices over most rows, hash rows and indices: reading in that order takes 40x as long."""
    from tunesmith.data.rows import content_hash

    indices = getattr(dataset, "_indices", None)
    columns = tuple(sorted(dataset.column_names))
    if indices is None or 2 * len(dataset) < dataset.data.num_rows:
        return content_hash(dataset, columns)
    order = np.asarray(indices.column(0)).astype("<i8")
    return content_hash(type(dataset)(dataset.data), columns) + hashlib.sha256(order.tobytes()).hexdigest()


def _rows_mark(rows: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(item_mark(row) or b"?")
    return digest.digest()


def _attribute_mark(value: Any, rows: int, depth: int) -> bytes:
    """Hash an attribute that contains rows; empty for counters, caches, tokenizers and the like."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return (item_mark(value) or b"") if value.ndim and len(value) == rows else b""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sized):
        return b""
    if hasattr(value, "columns") and hasattr(value, "iloc"):
        frame: Any = value  # pandas
        return b"".join(_rows_mark([str(name), *frame[name].tolist()]) for name in frame.columns)
    if isinstance(value, Mapping):
        parts = {str(k): _attribute_mark(v, rows, depth) for k, v in value.items()} if len(value) < 100 else {}
        return b"".join(k.encode() + found for k, found in sorted(parts.items()) if found)
    if isinstance(value, (list, tuple)):
        if len(value) == rows and not any(_is_dataset(v) for v in value[:1]):
            return _rows_mark(value)
        return b"".join(_attribute_mark(v, rows, depth + 1) for v in value[:100]) if depth < DEEPEST else b""
    return content_of(value, depth + 1).encode() if _is_dataset(value) else b""


def is_arrow_dataset(dataset: Any) -> bool:
    """Return whether this is a map-style `datasets.Dataset`, without importing the library."""
    return hasattr(dataset, "remove_columns") and hasattr(dataset, "data") and bool(has_length(dataset))


def _is_dataset(value: Any) -> bool:
    return is_arrow_dataset(value) or isinstance(value, torch.utils.data.Dataset)


def item_mark(item: Any) -> bytes | None:
    """Return a hash of one row as a dataset returns it; None if something in it cannot be hashed."""
    parts: list[bytes] = []
    try:
        _gather(parts.append, item, 0)
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError):
        return None
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


def _gather(put: Callable[[bytes], None], value: Any, depth: int) -> None:
    """Put every part of a value with its type and size. Frequent types are tested first."""
    kind = type(value)
    if depth > DEEPEST:
        raise ValueError("too deep")
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        value = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if kind is str:
        put(b"s%d " % len(value) + value.encode("utf-8", "surrogatepass"))
    elif value is None or isinstance(value, (int, float, complex, bytes, np.generic, Enum)):
        put(f"{kind.__name__} {value!r};".encode())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        put(f"{value.dtype.str}{value.shape};".encode() + value.tobytes())
    elif isinstance(value, (list, tuple, np.ndarray)):
        put(b"[%d" % len(value))
        if len(value) and all(type(v) is int for v in value):
            put(array("q", value).tobytes())
            return
        for part in value:
            _gather(put, part, depth + 1)
    elif isinstance(value, Mapping):
        put(b"{%d" % len(value))
        for key in sorted(value, key=str):
            put(b"%s:" % str(key).encode("utf-8", "surrogatepass"))
            _gather(put, value[key], depth + 1)
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # an image
        put(f"{getattr(value, 'mode', '')} {value.size};".encode() + value.tobytes())
    elif vars(value):
        _gather(put, vars(value), depth + 1)
    else:
        raise TypeError(kind.__name__)


def settings_of(value: Any) -> str:
    """Return the kind of a collator and its plain settings, without any other state."""
    if isinstance(value, functools.partial):
        return f"{settings_of(value.func)} {_simple([*value.args, *sorted(value.keywords.items())])}"
    if isinstance(value, type) or not is_dataclass(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    found = {f.name: getattr(value, f.name, None) for f in fields(value)}
    return f"{type(value).__qualname__} {_simple(sorted(found.items()))}"


def _simple(values: Any) -> str:
    kinds = (str, int, float, bool, type(None), Enum)
    return repr([v for v in values if not isinstance(v, tuple) or isinstance(v[-1], kinds)])
