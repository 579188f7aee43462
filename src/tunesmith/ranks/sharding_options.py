"""What was asked for about FSDP, by a flag, by `TrainingArguments` or by `accelerate launch`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.files import read_json

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
    "activation_checkpointing": "Use gradient_checkpointing (--gradient_checkpointing).",
    "activation_checkpointing_offload": "Use gradient_checkpointing (--gradient_checkpointing).",
    "ignored_modules": "Every parameter is sharded. Leave it out.",
    "xla": "There is no XLA here. Leave it out.",
    "xla_fsdp_v2": "There is no XLA here. Leave it out.",
    "xla_fsdp_grad_ckpt": "There is no XLA here. Leave it out.",
    "xla_fsdp_settings": "There is no XLA here. Leave it out.",
}
"""Options that are refused when they are set to anything that means something."""

_DECIDED_BY_TORCH = (
    "forward_prefetch",
    "backward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
    "cpu_ram_efficient_loading",
    "min_num_params",
)
"""Accepted with any value: `fully_shard` prefetches by itself and keeps the parameters' names, the weights are always
those of rank 0, and a smallest size has a meaning for SIZE_BASED_WRAP only, which is refused."""

_KNOWN = ("version", "reshard_after_forward", "sharding_strategy", "auto_wrap_policy", "state_dict_type")
_LAYERS = ("transformer_layer_cls_to_wrap", "transformer_cls_to_wrap")


@dataclass(frozen=True)
class Sharding:
    """`layers` are class names of the modules that are sharded one by one; None: those that the model names itself."""

    reshard_after_forward: bool = True
    layers: tuple[str, ...] | None = None


def read_sharding(asked: bool | str | Sequence[str] | None, config: Mapping[str, Any] | str | None) -> Sharding | None:
    """What `fsdp` and `fsdp_config` ask for, None when it is nothing; a ConfigError names all that is not supported."""
    options = _options_of(config)
    unknown = [problem for name in options for problem in _unknown_option(name)]
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
    allowed = {
        "version": (("2", ""), "Use 2: torch's fully_shard is what runs."),
        "reshard_after_forward": (tuple(STRATEGIES), "Use true or false."),
        "sharding_strategy": (("full_shard", "1", ""), "Use reshard_after_forward: true or false."),
        "auto_wrap_policy": (("transformer_based_wrap", "no_wrap", ""), "Use TRANSFORMER_BASED_WRAP or NO_WRAP."),
        "state_dict_type": (
            ("full_state_dict", ""),
            "Use FULL_STATE_DICT: a checkpoint is whole, and loads without FSDP.",
        ),
    }
    for name, value in options.items():
        if name in allowed:
            good, fix = allowed[name]
            plain = "" if value is None else str(value).lower()
            if plain not in good:
                problems.append(f"fsdp_config {name} {value!r} is not supported. {fix}")
        elif name in _REFUSED_KEYS and _means_something(value):
            problems.append(f"fsdp_config {name} is not supported. {_REFUSED_KEYS[name]}")
    return problems


def _unknown_option(name: str) -> list[str]:
    known = (*_KNOWN, *_LAYERS, *_DECIDED_BY_TORCH)
    if name in known or name in _REFUSED_KEYS:
        return []
    return [f"fsdp_config has no {name!r}. {did_you_mean(name, known) or 'Leave it out.'}"]


def _layers_of(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    if str(options.get("auto_wrap_policy", "")).lower() == "no_wrap":
        return ()
    named = next((options[n] for n in _LAYERS if options.get(n)), None)
    if named is None:
        return None
    return tuple(n.strip() for n in (named.split(",") if isinstance(named, str) else named))


def _means_something(value: Any) -> bool:
    return bool(value) and str(value).lower() not in ("false", "0", "none", "no")
