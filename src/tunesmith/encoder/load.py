"""A pretrained encoder with a classification head for a LabelMap. Home of `transformers`' model classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.encoder.config_file import name_field, read_config_file
from tunesmith.encoder.guard import naming
from tunesmith.encoder.head import start_head_afresh
from tunesmith.encoder.probe import require_answer
from tunesmith.encoder.sizes import require_fitting, without_first_values
from tunesmith.errors import ConfigError
from tunesmith.labels import LabelMap
from tunesmith.run.environment import without_fsdp


@dataclass(frozen=True)
class LoadedModel:
    """`model` is in fp32 train mode; `notes` are sentences for the user (for example: the head is new)."""

    model: Any
    notes: tuple[str, ...]
    parameters: int
    fresh: tuple[str, ...] = ()
    """Parameters that are not in the checkpoint: they start at random."""


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict, refused when it is missing, damaged, asks for code or for an absurd size."""
    config = read_config_file(folder)
    if not config:
        raise ConfigError("no config.json there, so it is not a model folder", where=str(folder))
    return config


def load_model(
    folder: str | Path,
    labels: LabelMap,
    *,
    ignore_mismatched_sizes: bool = False,
    attention: str | None = None,
    new_head: bool = False,
) -> LoadedModel:
    """The model with a head of the right size and `id2label` set to the real names. `new_head` draws the head anew."""
    from transformers import AutoModelForSequenceClassification

    folder = Path(folder)
    stored = read_model_config(folder)
    _refuse_pickle(folder)
    config = _make_config(folder, labels)
    require_fitting(config, stored, folder)
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    with _quiet(), without_fsdp(), without_first_values(), naming("the model cannot be loaded", folder):
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
    fresh = _fresh_names(model, info, stored, labels, ignore_mismatched_sizes, str(folder))
    if new_head:
        fresh = start_head_afresh(model)
    _refuse_non_finite(model, str(folder))
    require_answer(model, folder)
    _leave_file(model)
    model.train()
    notes = (f"new, to be trained: {', '.join(fresh)}",) if fresh else ()
    return LoadedModel(model, notes, sum(p.numel() for p in model.parameters()), fresh)


def _make_config(folder: Path, labels: LabelMap) -> Any:
    from transformers import AutoConfig

    with naming("its config.json cannot be used", folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
            if hasattr(config, name):
                setattr(config, name, None)
        config.num_labels = len(labels)
        config.id2label = labels.id2label
        config.label2id = labels.label2id
        config.problem_type = labels.task.problem_type
        if getattr(config, "chunk_size_feed_forward", 0):
            config.chunk_size_feed_forward = 0  # the same maths in pieces, for rows of a multiple of that length only
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar and no table while weights load: `LoadedModel.notes` says what matters in one line."""
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


def _fresh_names(
    model: Any, info: Any, stored: dict[str, Any], labels: LabelMap, allow_mismatch: bool, where: str
) -> tuple[str, ...]:
    missing = sorted(info["missing_keys"])
    shapes = {str(name): (tuple(there), tuple(asked)) for name, there, asked in info["mismatched_keys"]}
    mismatched = sorted(shapes)
    encoder = next((name for name in mismatched if name.startswith(f"{model.base_model_prefix}.")), None)
    if encoder is not None:
        there, asked = shapes[encoder]
        side = next((new for new, old in zip(asked, there, strict=False) if new != old), 0)
        raise ConfigError(
            f"asks for {encoder} of the shape {asked}{name_field(stored, side)}; in the weights it is {there}",
            where=str(Path(where) / "config.json"),
            fix="Use the config.json that belongs to the weights.",
        )
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
    return tuple(missing + mismatched)


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


def _leave_file(model: Any) -> None:
    """Copies every tensor: they are views of the mapped file, and would change with it."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _refuse_non_finite(model: Any, where: str) -> None:
    import torch

    from tunesmith.errors import NumericsError

    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):  # a sum has one pass and no copy
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise NumericsError(
                f"the pretrained weights are not finite: {name}", where=where, fix="Use an undamaged copy of the model."
            )
