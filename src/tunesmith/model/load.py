"""A pretrained encoder with a classification head for a LabelMap. Home of `transformers`' model classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, DataError
from tunesmith.labels import LabelMap
from tunesmith.model.head import start_head_afresh

LARGEST_MODEL = 20_000_000_000
"""Parameters; a config that asks for more is refused before anything is allocated."""

_SIZE_KEYS = (
    "num_hidden_layers",
    "n_layers",
    "hidden_size",
    "dim",
    "intermediate_size",
    "hidden_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class LoadedModel:
    """`model` is in fp32 train mode; `notes` are sentences for the user (for example: the head is new)."""

    model: Any
    notes: tuple[str, ...]
    parameters: int


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict, refused when it is missing, damaged, asks for code or for an absurd size."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no config.json there, so it is not a model folder", where=str(folder)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON ({error})", where=str(file)) from None
    if not isinstance(config, dict):
        raise ConfigError("is not a JSON object", where=str(file))
    if "auto_map" in config:
        raise ConfigError(
            "asks to run Python code from the model folder (auto_map), which tunesmith never does",
            where=str(file),
            fix="Use a model whose architecture is part of transformers.",
        )
    estimate = _estimate_parameters(config, str(file))
    if estimate > LARGEST_MODEL:
        raise ConfigError(
            f"describes a model of about {estimate:.1e} parameters; the limit is {LARGEST_MODEL:.0e}", where=str(file)
        )
    return config


def _estimate_parameters(config: dict[str, Any], where: str) -> float:
    for key in _SIZE_KEYS:
        value = config.get(key, 1)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ConfigError(f"{key} is {value!r}, not a positive whole number", where=where)
    hidden = config.get("hidden_size", config.get("dim", 768)) or 768
    inner = config.get("intermediate_size", config.get("hidden_dim", 4 * hidden)) or 4 * hidden
    layers = config.get("num_hidden_layers", config.get("n_layers", 12)) or 12
    if layers > 1000:
        raise ConfigError(f"describes {layers} layers; the limit is 1000", where=where)
    return (
        float(layers) * (4 * hidden * hidden + 2 * hidden * inner)
        + float(config.get("vocab_size", 30522) or 0) * hidden
    )


def load_model(
    folder: str | Path,
    labels: LabelMap,
    *,
    ignore_mismatched_sizes: bool = False,
    attention: str | None = None,
    new_head: bool = False,
) -> LoadedModel:
    """The model with a head of the right size and `id2label` set to the real names. `new_head` draws the head anew."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = Path(folder)
    stored = read_model_config(folder)
    _refuse_pickle(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        raise ConfigError(
            f"its config.json cannot be used: {str(error).splitlines()[0][:200]}", where=str(folder)
        ) from error
    for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
        if hasattr(config, name):
            setattr(config, name, None)
    config.num_labels = len(labels)
    config.id2label = labels.id2label
    config.label2id = labels.label2id
    config.problem_type = labels.task.problem_type
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    try:
        with _quiet():
            model, info = AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                dtype="float32",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"the model cannot be loaded: {str(error).splitlines()[0]}", where=str(folder)) from error
    notes = _loading_notes(model, info, stored, labels, ignore_mismatched_sizes, str(folder))
    if new_head:
        notes = (f"new, to be trained: {', '.join(start_head_afresh(model))}",)
    _refuse_non_finite(model, str(folder))
    model.train()
    return LoadedModel(model, notes, sum(p.numel() for p in model.parameters()))


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar and no table while weights load: `_loading_notes` says what matters in one line."""
    import transformers.utils.logging

    logging: Any = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _loading_notes(
    model: Any, info: Any, stored: dict[str, Any], labels: LabelMap, allow_mismatch: bool, where: str
) -> tuple[str, ...]:
    missing = sorted(info["missing_keys"])
    mismatched = sorted(str(k[0] if isinstance(k, (tuple, list)) else k) for k in info["mismatched_keys"])
    if mismatched and not allow_mismatch:
        had = stored.get("num_labels") or len(stored.get("id2label") or {}) or 2
        raise ConfigError(
            f"its head was trained for {had} labels and the data has {len(labels)} ({', '.join(labels.names[:6])})",
            where=where,
            fix="Give --ignore_mismatched_sizes to start with a new head.",
        )
    total = len(list(model.state_dict()))
    if len(missing) > total // 2:
        raise ConfigError(
            f"{len(missing)} of {total} tensors are not in the checkpoint, so it is not a pretrained {type(model).__name__}",
            where=where,
        )
    fresh = missing + mismatched
    if fresh:
        return (f"new, to be trained: {', '.join(fresh)}",)
    return ()


def _refuse_pickle(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "tf_model.h5", "model.ckpt"):
        if (folder / name).exists():
            raise ConfigError(
                f"the weights are only there as {name}, a format that can run code when it is read",
                where=str(folder),
                fix="Convert it once: `model.save_pretrained(folder)` of a current transformers writes model.safetensors.",
            )
    raise ConfigError("no model.safetensors there", where=str(folder))


def _refuse_non_finite(model: Any, where: str) -> None:
    import torch

    from tunesmith.errors import NumericsError

    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NumericsError(
                f"the pretrained weights are not finite: {name}", where=where, fix="Use an undamaged copy of the model."
            )


def check_ids_fit(model: Any, highest_id: int, where: str) -> None:
    """A DataError when the tokenizer makes ids that the embedding table does not have."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    if highest_id >= rows:
        raise DataError(
            f"the tokenizer gives token id {highest_id}, but the model has only {rows} embeddings",
            where=where,
            fix="Use the model's own tokenizer.",
        )
