"""FSDP: what was asked for (by a flag, by `TrainingArguments`, by `accelerate launch`), and a model whose weights, gradients and
optimizer state are sharded over the ranks by torch's `fully_shard` (FSDP2).

A shard of a tensor is a `DTensor`; all ranks gather the full tensor at once (decisions/0401). Imports torch where it is used:
options are checked before it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.files import read_json

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

STRATEGIES = {"full_shard": True, "shard_grad_op": False, "1": True, "2": False, "true": True, "false": False}
"""Name of a strategy -> whether a layer's weights are given back after its forward pass."""

_NO_STRATEGY = "Use full_shard, or shard_grad_op, which keeps the weights between forward and backward."
_REFUSED_WORDS = {
    "offload": "Nothing is moved to host memory. Use --gradient_checkpointing, or more devices.",
    "no_shard": "Leave fsdp out: without it every rank holds a whole copy (DDP).",
    "hybrid_shard": _NO_STRATEGY,
    "hybrid_shard_zero2": _NO_STRATEGY,
}
_REFUSED_KEYS = {
    "cpu_offload": _REFUSED_WORDS["offload"],
    "offload_params": _REFUSED_WORDS["offload"],
    **dict.fromkeys(
        ("activation_checkpointing", "activation_checkpointing_offload"),
        "Use gradient_checkpointing (--gradient_checkpointing).",
    ),
    "ignored_modules": "Every parameter is sharded. Leave it out.",
    **dict.fromkeys(
        ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"), "There is no XLA here. Leave it out."
    ),
}
"""Options that are refused when they are set to anything that means something."""

_DECIDED_BY_TORCH = (
    *("forward_prefetch", "backward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states"),
    *("cpu_ram_efficient_loading", "min_num_params"),
)
"""Accepted with any value: `fully_shard` prefetches by itself and keeps the parameters' names, the weights are always
those of rank 0, and a smallest size has a meaning for SIZE_BASED_WRAP only, which is refused."""

_ALLOWED = {
    "version": (("2", ""), "Use 2: torch's fully_shard is what runs."),
    "reshard_after_forward": (tuple(STRATEGIES), "Use true or false."),
    "sharding_strategy": (("full_shard", "1", ""), "Use reshard_after_forward: true or false."),
    "auto_wrap_policy": (("transformer_based_wrap", "no_wrap", ""), "Use TRANSFORMER_BASED_WRAP or NO_WRAP."),
    "state_dict_type": (("full_state_dict", ""), "Use FULL_STATE_DICT: a checkpoint is whole, and loads without FSDP."),
}
"""Options of which some values work, and what to use instead of the others."""
_LAYERS = ("transformer_layer_cls_to_wrap", "transformer_cls_to_wrap")


@dataclass(frozen=True)
class Sharding:
    """`layers` are class names of the modules that are sharded one by one; None: those that the model names itself."""

    reshard_after_forward: bool = True
    layers: tuple[str, ...] | None = None


def read_sharding(asked: bool | str | Sequence[str] | None, config: Mapping[str, Any] | str | None) -> Sharding | None:
    """What `fsdp` and `fsdp_config` ask for, None when it is nothing; a ConfigError names all that is not supported."""
    options, known = _options_of(config), (*_ALLOWED, *_LAYERS, *_DECIDED_BY_TORCH)
    unknown = [
        f"fsdp_config has no {name!r}. {did_you_mean(name, known) or 'Leave it out.'}"
        for name in options
        if name not in known and name not in _REFUSED_KEYS
    ]
    if unknown:
        raise ConfigError("; ".join(unknown), problems=tuple(unknown))
    words = [] if not asked or asked is True else asked.split() if isinstance(asked, str) else [str(w) for w in asked]
    words = [getattr(w, "value", w).lower() for w in words]
    if not asked or words in (["false"], ["no"]):
        set_all_the_same = sorted(k for k, v in options.items() if _means_something(v) and k not in _DECIDED_BY_TORCH)
        if set_all_the_same:
            raise ConfigError(
                f"fsdp_config sets {', '.join(set_all_the_same)}, but fsdp is off", fix="Add --fsdp full_shard."
            )
        return None
    problems = [*_word_problems(words), *_option_problems(options)]
    if problems:
        raise ConfigError("; ".join(problems), problems=tuple(problems))
    given = [STRATEGIES[w] for w in words if w in STRATEGIES]
    wish = options.get("reshard_after_forward", given[0] if given else True)
    return Sharding(STRATEGIES[str(wish).lower()], _layers_of(options))


def sharding_of_launcher(environ: Mapping[str, str]) -> Sharding | None:
    """The FSDP options of `accelerate launch`, from its flags or its config file; None when it has none."""
    if environ.get("ACCELERATE_USE_FSDP", "false").lower() not in ("true", "1"):
        return None
    options: dict[str, Any] = {k[5:].lower(): v for k, v in environ.items() if k.startswith("FSDP_")}
    # version 1 is the launcher's default, and its sharding strategy then says what reshard_after_forward does in 2
    if options.pop("version", "1") == "1":
        options.pop("reshard_after_forward", None)
        strategy = options.pop("sharding_strategy", "full_shard").lower()
    else:
        options.pop("sharding_strategy", None)
        strategy = "full_shard"
    names = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
    try:
        return read_sharding(names.get(strategy, strategy), options)
    except ConfigError as error:
        raise ConfigError(
            f"the launcher asks for an FSDP that is not supported: {error.problem}", problems=error.problems
        ) from None


def _options_of(config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The options without their prefix `fsdp_`; a string is the path of a JSON file, as in transformers."""
    if isinstance(config, str) and config:
        try:
            config = read_json(config, follow=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"is not a JSON file of options: {error}", where=f"fsdp_config {config}") from None
        if not isinstance(config, dict):
            raise ConfigError("does not hold a JSON object", where="fsdp_config")
    assert not isinstance(config, str)
    return {str(k).removeprefix("fsdp_").lower(): v for k, v in (config or {}).items()}


def _word_problems(words: list[str]) -> list[str]:
    known = ("full_shard", "shard_grad_op", "auto_wrap")
    problems = []
    for word in words:
        if word in _REFUSED_WORDS:
            problems.append(f"fsdp {word} is not supported. {_REFUSED_WORDS[word]}")
        elif word not in (*known, "true"):
            problems.append(f"fsdp {word!r} is not known. {did_you_mean(word, known) or _NO_STRATEGY}")
    return problems


def _option_problems(options: Mapping[str, Any]) -> list[str]:
    """One sentence for each option of `fsdp_config` that cannot be carried out."""
    problems = []
    for name, value in options.items():
        if name in _ALLOWED:
            good, fix = _ALLOWED[name]
            plain = "" if value is None else str(value).lower()
            if plain not in good:
                problems.append(f"fsdp_config {name} {value!r} is not supported. {fix}")
        elif name in _REFUSED_KEYS and _means_something(value):
            problems.append(f"fsdp_config {name} is not supported. {_REFUSED_KEYS[name]}")
    return problems


def _layers_of(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    if str(options.get("auto_wrap_policy", "")).lower() == "no_wrap":
        return ()
    named = next((options[n] for n in _LAYERS if options.get(n)), None)
    if named is None:
        return None
    return tuple(n.strip() for n in (named.split(",") if isinstance(named, str) else named))


def _means_something(value: Any) -> bool:
    return bool(value) and str(value).lower() not in ("false", "0", "none", "no")


_SHARDED: WeakKeyDictionary[nn.Module, Sharding] = WeakKeyDictionary()
"""The models that were sharded, and how: torch has no getter for it."""


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` was at work."""
    return model in _SHARDED


def shard_model(model: nn.Module, optimizer: Optimizer, sharding: Sharding, device: torch.device) -> None:
    """Shards the model over all ranks, in place, from the weights of rank 0, and points the optimizer at the shards."""
    if is_sharded(model):
        return
    from torch.distributed import broadcast

    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        # DDP does this, too: a head that a rank drew from another seed would give it other parts
        sent = tensor.data.contiguous()  # itself, where it is contiguous already
        broadcast(sent, 0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(sent)
    _fully_shard(model, sharding, device)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise ConfigError(
                "the optimizer holds parameters that are not the model's, and cannot be sharded with it",
                fix="Make it from model.parameters(), or leave fsdp out.",
            )
        fresh = []
        for old in group["params"]:
            new = by_name[names[id(old)]]
            if old in optimizer.state:
                optimizer.state[new] = {k: sharded_like(v, new) for k, v in optimizer.state.pop(old).items()}
            fresh.append(new)
        group["params"] = fresh


def _fully_shard(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (get_world_size(),))
    own = getattr(model, "_no_split_modules", None) or ()
    wanted = set(own if sharding.layers is None else sharding.layers)
    found = [m for m in model.modules() if type(m).__name__ in wanted]
    missing = wanted - {type(m).__name__ for m in found} if sharding.layers is not None else set()
    if missing:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(
            f"fsdp_config transformer_layer_cls_to_wrap: the model has no {', '.join(sorted(missing))}",
            fix=f"It has {', '.join(known[:20])}.",
        )
    for module in found:
        fully_shard(module, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
    fully_shard(model, mesh=mesh)
    _SHARDED[model] = sharding


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Inside, each rank holds all weights and its passes wait for no other rank: ranks may run different numbers of batches.

    All ranks enter and leave it together. Gradients of passes inside stay on their rank, and are dropped at the end.
    """
    if not is_sharded(model):
        yield
        return
    root: Any = model
    parts: list[Any] = [m for m in model.modules() if hasattr(m, "unshard")]
    for part in parts:
        part.unshard()
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for part in parts:
            # the outermost keeps its weights (embeddings, head) until the backward pass, which begins with them
            part.set_reshard_after_forward(_SHARDED[model].reshard_after_forward and part is not root, recurse=False)
            part.reshard()
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; all ranks ask for it together. One that is not sharded is returned as it is."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def gathered_state(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """The model's tensors, whole and on the CPU; all ranks call it, those that do not `keep` get an empty dict."""
    out = {}
    for name, tensor in model.state_dict().items():
        full = gathered(tensor.detach())  # one at a time: a device need not hold more than the largest
        if keep:
            out[name] = full.cpu()
    return out


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def sharded_like(stored: Any, own: torch.Tensor) -> Any:
    """A full tensor in the form that `own` has: this rank's shard of it where `own` is sharded. Asks no other rank."""
    if not hasattr(own, "full_tensor") or getattr(stored, "shape", None) != own.shape:
        return stored
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(stored.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
