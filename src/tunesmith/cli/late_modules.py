"""Parts of torch, scipy and transformers that a command hardly ever uses, loaded when they are used and not before.

transformers imports torch's compiler, its sharded tensors and its continuous batching to name their types. Here an import of
such a part gives a stand-in: its listed names are placeholders, and everything else loads the part itself. Only a command does
this, in a process with no code of the user's, and only for versions it was tried with.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from tunesmith.cli.import_scans import remember_scans

TRIED = {"torch": ((2, 11), (2, 13)), "transformers": ((5, 17), (5, 22))}
"""The lowest and the highest version that the commands were tried with."""
_BATCHING = "transformers.generation.continuous_batching"
_SHARDED = "torch.distributed.tensor"
_META = "torch._meta_registrations"
_QUANTIZED = ("ao", "quantization", "nn.intrinsic", "nn.qat", "nn.quantizable", "nn.quantized")
LATE: dict[str, tuple[str, ...]] = {
    **{f"torch.{name}": () for name in (*_QUANTIZED, "export", "masked")},
    _META: (),
    "torch.distributions": ("constraints",),
    "sympy": ("Basic", "Expr"),
    "torch._dynamo": ("allow_in_graph", "assume_constant_result", "disable", "forbid_in_graph", "graph_break"),
    "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    _SHARDED: ("DTensor", "Partial", "Replicate", "Shard", "distribute_module", "distribute_tensor"),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed.checkpoint": (),
    "torch.distributed.checkpoint.hf_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "FullyShardedDataParallel", "MixedPrecisionPolicy"),
    f"{_SHARDED}._utils": ("compute_local_shape_and_global_offset",),
    f"{_SHARDED}.placement_types": ("Partial", "Placement", "Replicate", "Shard", "_StridedShard"),
    "torch.fx.experimental.symbolic_shapes": (
        *("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "guarding_hint_or_throw"),
        *("has_guarding_hint", "is_nested_int", "sym_eq"),
    ),
    "scipy.optimize": ("brentq", "linear_sum_assignment", "linprog", "minimize", "minimize_scalar", "nnls", "newton"),
    "scipy.integrate": ("trapezoid",),
    "scipy.interpolate": ("BSpline",),
    "sklearn.metrics": ("roc_curve",),
    "scipy.stats": ("chi2", "gmean", "rankdata", "spearmanr"),
    _BATCHING: ("ContinuousMixin", "PagedAttentionCache"),
    f"{_BATCHING}.cache": ("PagedAttentionCache",),
}
"""Module -> the names that other modules import from it without using them at once."""
PLACEMENTS = ("Partial", "Replicate", "Shard")
"""Made while a module is imported, as values of tables that only sharded models read."""


class Placeholder(type):
    """The type of a name that is not loaded: a call uses the real thing, and nothing is an instance before that is loaded."""

    home: str

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if "home" not in vars(cls) or (cls.__name__ in PLACEMENTS and is_late(cls.home)):
            return super().__call__() if "home" in vars(cls) else super().__call__(*args, **options)
        return getattr(load_now(cls.home), cls.__name__)(*args, **options)

    def __getattr__(cls, name: str) -> Any:
        if "home" not in vars(cls) or name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(load_now(cls.home), cls.__name__), name)

    def __instancecheck__(cls, one: Any) -> bool:
        if "home" not in vars(cls):
            return super().__instancecheck__(one)
        return not is_late(cls.home) and isinstance(one, getattr(sys.modules[cls.home], cls.__name__))


def _as_it_is(function: Any = None, *args: Any, **options: Any) -> Any:
    """What the marks of the compiler do while there is no compiler."""
    return function if callable(function) else _as_it_is


def _plain(name: str) -> Callable[..., Any]:
    """A question about a truth value that may be symbolic: without the compiler it is a plain one."""
    return lambda test, *more: test if type(test) is bool else getattr(load_now(_SYMBOLS), name)(test, *more)


def _is_nested(size: Any) -> bool:
    return type(size) is not int and bool(load_now(_SYMBOLS).is_nested_int(size))


def _same_shape(one: Any, other: Any) -> Any:
    plain = all(type(shape) is not int and all(type(n) is int for n in shape) for shape in (one, other))
    return tuple(one) == tuple(other) if plain else load_now(_SYMBOLS).sym_eq(one, other)


_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    "torch._dynamo": {**dict.fromkeys(LATE["torch._dynamo"], _as_it_is), "graph_break": lambda *args: None},
    _SYMBOLS: {name: _plain(name) for name in LATE[_SYMBOLS]} | {"is_nested_int": _is_nested, "sym_eq": _same_shape},
}
"""What stands for functions that are called before the compiler is there."""


class StandIn(ModuleType):
    """A module that is not loaded yet."""

    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        if name.startswith("__"):
            raise AttributeError(name)
        if not is_late(own) or name not in LATE[own]:
            return getattr(load_now(own), name)
        known = FUNCTIONS.get(own)
        found = known[name] if known else Placeholder(name, (), {"home": own, "__module__": own})
        setattr(self, name, found)
        return found


def is_late(name: str) -> bool:
    """Whether the module is not loaded; a stand-in is not it."""
    return isinstance(sys.modules.get(name), StandIn | None)


def load_now(name: str) -> ModuleType:
    """The module itself, from here on in the place of its stand-in."""
    if isinstance(sys.modules.get(name), StandIn):
        _waiting.discard(name)
        del sys.modules[name]
        if name.startswith("torch.") and name != _META:
            load_now(_META)  # what traces, shards or exports computes shapes on the meta device
    return import_module(name)


_waiting: set[str] = set()


class _Reuse(Loader):
    """Gives a module that is there already, or a stand-in."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec or module.__spec__


def _allow_generators() -> None:
    """From 2.13 on torch makes no Generator before one of the modules behind its meta kernels has set this."""
    core = sys.modules["torch._C"]
    if hasattr(core, "_set_generator_metaclass"):
        core._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


class LateFinder(MetaPathFinder):
    """Answers imports of late modules with stand-ins, and loads one whose submodule is wanted."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a stand-in, or None for what is none of our business."""
        if name in _waiting:
            if name == _META:
                _allow_generators()
            return ModuleSpec(name, _Reuse(StandIn(name)), is_package=True)
        parent = name.rpartition(".")[0]
        while parent and not isinstance(sys.modules.get(parent), StandIn):
            parent = parent.rpartition(".")[0]
        if not parent:
            return None
        load_now(parent)
        return ModuleSpec(name, _Reuse(import_module(name)))


@contextmanager
def loading() -> Iterator[None]:
    """Around imports: the collector of cycles waits. It would walk over a million objects again and again; all of them stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def load_late() -> None:
    """From here on the parts of `LATE` that are not loaded yet wait until they are used."""
    if all(_was_tried(package, *limits) for package, limits in TRIED.items()):
        _waiting.update(name for name in LATE if name not in sys.modules)
        sys.meta_path.insert(0, LateFinder())
        remember_scans()


def _was_tried(package: str, lowest: tuple[int, int], highest: tuple[int, int]) -> bool:
    try:
        major, minor = version(package).split(".")[:2]
        return lowest <= (int(major), int(minor)) <= highest
    except (PackageNotFoundError, ValueError):
        return False
