"""A pretrained encoder with a classification head for a LabelMap, and the output names of a trained head. The only module
that uses the model classes of transformers.

The size of a model is counted on the meta device before memory is allocated. A loaded model immediately computes one short
row, so that an invalid config is refused before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import ConfigError, NumericsError, ResourceError
from tunesmith.labels import LabelMap, Task, match_names
from tunesmith.models.files import count_parameters, find_weights, name_field, naming, read_config_file

if TYPE_CHECKING:
    import torch

LARGEST_MODEL = 20_000_000_000
"""Maximum number of parameters; a larger config is refused."""
MOST_NEW = 16_000_000
"""Parameters allowed in addition to twice those in the folder: a head of 10,000 labels over 1,024 dimensions has 11 million."""


def require_fitting(config: Any, stored: dict[str, Any], folder: Path) -> None:
    """Refuse a model that is far larger than the weights in its folder, or larger than the memory."""
    import torch
    from transformers import AutoModelForSequenceClassification

    make: Any = AutoModelForSequenceClassification.from_config
    described = naming("its config.json describes no model", folder)
    with described, torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = make(deepcopy(config))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    total = sum(tensor.numel() for tensor in tensors.values())
    there = count_parameters(folder)
    if total > min(LARGEST_MODEL, 2 * there + MOST_NEW):
        name, largest = max(tensors.items(), key=lambda item: item[1].numel())
        field = name_field(stored, max(largest.shape, default=0))
        raise ConfigError(
            f"describes a model of {total:,} parameters, {largest.numel():,} of them in {name}{field}; "
            f"the weights there have {there:,}",
            where=str(folder / "config.json"),
        )
    free = free_memory(swap=True)
    if free is not None and 4 * total > free:
        problem = f"the model needs {4 * total / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free"
        raise ResourceError(problem, where=str(folder))


def free_memory(*, swap: bool) -> int | None:
    """Return the available memory in bytes; None if Linux doesn't report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    names = ("MemAvailable", "SwapFree") if swap else ("MemAvailable",)
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names)) or None


LENGTH = 5


def compute_row(model: Any) -> Any:
    """Return the logits of a short row; None for a model that can't be called this way."""
    import torch

    try:
        table = model.get_input_embeddings()
    except NotImplementedError:
        table = None
    rows = getattr(table, "num_embeddings", None)
    if rows is None or hasattr(model.base_model, "set_attention_type"):
        return (
            None  # CANINE has no token table; BigBird switches to full attention permanently when it sees a short row
        )
    ids = torch.arange(LENGTH, device=table.weight.device).remainder(rows)[None]
    end = getattr(model.config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < rows:
        ids[0, -1] = end  # BART and similar models read the position of this token
    was = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    finally:
        model.train(was)


def require_answer(model: Any, folder: Path) -> None:
    """Raise a ConfigError if the model can't compute a short row, a NumericsError if its logits are NaN or infinite."""
    with naming("the model in its config.json can't be run", folder):
        logits = compute_row(model)
        if logits is not None and tuple(logits.shape) != (1, model.config.num_labels):
            raise ValueError(f"its output for one row has the shape {tuple(logits.shape)}")
    if logits is not None and not bool(logits.isfinite().all()):
        problem = "the model returned NaN or inf for a short test input"
        raise NumericsError(problem, where=str(folder), fix="Use an undamaged copy of the model and its config.json.")


@dataclass(frozen=True)
class LoadedModel:
    """`model` is in fp32 train mode; `notes` are sentences for the user (for example: the head is new)."""

    model: Any
    notes: tuple[str, ...]
    parameters: int
    fresh: tuple[str, ...] = ()
    """Parameters that are not in the checkpoint: they start at random."""


def read_model_config(folder: Path) -> dict[str, Any]:
    """Load config.json; refuse it if it is missing or damaged, names code or sets an absurd size."""
    config = read_config_file(folder)
    if not config:
        raise ConfigError("no config.json there, so it is not a model folder", where=str(folder))
    return config


def load_model(
    folder: str | Path,
    labels: LabelMap,
    *,
    ignore_mismatched_sizes: bool = False,
    new_head: bool = False,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Load the model with a head of the right size and `id2label` set to the real names. `new_head` re-initializes the head."""
    from transformers import AutoModelForSequenceClassification

    folder = Path(folder)
    stored = read_model_config(folder)
    find_weights(folder, str(folder))
    config = _make_config(folder, labels)
    require_fitting(config, stored, folder)
    with _quiet(), naming("the model cannot be loaded", folder):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            dtype="float32",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    fresh = _fresh_names(model, info, stored, labels, ignore_mismatched_sizes, str(folder))
    if new_head:
        fresh = _start_head_afresh(model)
    _leave_file(model, device)
    _refuse_non_finite(model, str(folder))
    require_answer(model, folder)
    model.train()
    notes = (f"newly initialized: {', '.join(fresh)}",) if fresh else ()
    return LoadedModel(model, notes, sum(p.numel() for p in model.parameters()), fresh)


def _start_head_afresh(model: Any) -> tuple[str, ...]:
    """Re-initialize everything above the encoder as the model class does; return the names of those parameters."""
    import torch

    fresh: list[str] = []
    for name, part in model.named_children():
        if name == model.base_model_prefix:
            continue
        for module in part.modules():
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False
            with torch.no_grad():
                model._init_weights(module)
        fresh += [f"{name}.{key}" for key, _ in part.named_parameters()]
    return tuple(fresh)


def _make_config(folder: Path, labels: LabelMap) -> Any:
    from transformers import AutoConfig

    with naming("its config.json cannot be used", folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
            if hasattr(config, name):
                setattr(config, name, None)
        config.num_labels = len(labels)
        single = (
            len(labels) == 1 and labels.task is not Task.REGRESSION
        )  # transformers has no problem_type for one class
        config.problem_type = None if single else labels.task.problem_type
        config.id2label, config.label2id = labels.id2label, labels.label2id
        if getattr(config, "chunk_size_feed_forward", 0):
            config.chunk_size_feed_forward = 0  # the same math in pieces, for rows of a multiple of that length only
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide bars and tables while weights load; `LoadedModel.notes` has the result in one line."""
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
    shapes = {str(name): (tuple(there), tuple(asked)) for name, there, asked in info["mismatched_keys"]}
    missing, mismatched = sorted(info["missing_keys"]), sorted(shapes)
    encoder = next((name for name in mismatched if name.startswith(f"{model.base_model_prefix}.")), None)
    if encoder is not None:
        there, asked = shapes[encoder]
        side = next((new for new, old in zip(asked, there, strict=False) if new != old), 0)
        problem = f"requires {encoder} with the shape {asked}{name_field(stored, side)}; in the weights it is {there}"
        fix = "Use the config.json that belongs to the weights."
        raise ConfigError(problem, where=str(Path(where) / "config.json"), fix=fix)
    if mismatched and not allow_mismatch:
        had = stored.get("num_labels") or len(stored.get("id2label") or {}) or 2
        problem = (
            f"its head was trained for {had} labels and the data has {len(labels)} ({', '.join(labels.names[:6])})"
        )
        raise ConfigError(problem, where=where, fix="Set --ignore_mismatched_sizes to start with a new head.")
    if len(missing) > (total := len(list(model.state_dict()))) // 2:
        problem = f"{len(missing)} of {total} tensors are not in the checkpoint, so it is not a pretrained {type(model).__name__}"
        raise ConfigError(problem, where=where)
    return tuple(missing + mismatched)


def _leave_file(model: Any, device: str | torch.device) -> None:
    """Copy every tensor: they are views of the memory-mapped file and would change with it."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(device, copy=True)


def _refuse_non_finite(model: Any, where: str) -> None:
    import torch

    floats = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    sums = torch.stack([tensor.sum() for tensor in floats.values()])  # a sum needs one pass and no copy
    for (name, tensor), finite in zip(floats.items(), torch.isfinite(sums).tolist(), strict=True):
        if not finite and not bool(torch.isfinite(tensor).all()):
            fix = "Use an undamaged copy of the model."
            raise NumericsError(f"the pretrained weights are NaN or infinite: {name}", where=where, fix=fix)


def head_mismatch(head: Sequence[str], names: Sequence[str], where: str) -> ConfigError:
    """Return the error for labels that don't match the outputs of a trained head."""
    if match_names(head, names) is not None:
        fix = "Omit --label_names: the order of the model is used."
    else:
        fix = (
            f"If they mean the same in this order, set --label_names {','.join(head)}; "
            "--ignore_mismatched_sizes starts a new head."
        )
    problem = f"its head was trained for {', '.join(head[:6])} and the data has {', '.join(names[:6])}"
    return ConfigError(problem, where=where, fix=fix)


def read_head_names(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the label names in a model's config.json by id; () without a trained head, or for LABEL_0, LABEL_1, ..."""
    kinds = config.get("architectures")
    classifier = isinstance(kinds, list) and any(str(kind).endswith("ForSequenceClassification") for kind in kinds)
    table = config.get("id2label")
    if not classifier or not isinstance(table, dict) or not all(str(key).isdecimal() for key in table):
        return ()
    ordered = tuple(str(table[key]) for key in sorted(table, key=int))
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in ordered) else ordered
