"""CUDA graphs of an encoder inside the user's own step: collator, loss, head, callbacks and optimizer stay in Python.

While `ModelGraphs.active()`, training calls of the encoders in a model are padded to one of few widths, and the forward and
backward pass of each shape are captured when it comes for the first time. So every use of a shape is a replay: a resumed run
draws the same dropout as an uninterrupted one. Capturing leaves the random generators as they were.

A captured pass reads and writes fixed memory. Three rules keep it correct:
- outputs and gradients are copied before autograd sees them, which may keep, change or accumulate them;
- a forward pass whose backward pass is still to come owns a `Slot`. A second call before that (two texts per row, R-Drop)
  uses another slot with other memory. All shapes of a slot share its memory, because only one of them is in use at a time;
- the captured passes use aliases of the weights. Autograd's node of a weight belongs to the stream on which it was made, which
  breaks a capture while another pass keeps it alive; and it would call the user's hooks on gradients a second time.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tunesmith.models.families import FAMILIES, why_not_by_config, why_not_original
from tunesmith.speedups.cuda_graphs import Fingerprint, bucket_width, capture_failure, capturing, forget_broken_capture
from tunesmith.speedups.packed_calls import own_forward
from tunesmith.speedups.relative import replace_method
from tunesmith.speedups.verify import (
    ROWS,
    Gradients,
    failure,
    float_tensors,
    generators_unchanged,
    judge_by,
    nothing_left_behind,
    weighted_gradients,
)

GRAPHS = "CUDA graph of the encoder"
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
OPTIONS = ("return_dict", "output_hidden_states")
IGNORED = ("num_items_in_batch",)
"""Arguments of a loss that models pass on to their encoder."""
IGNORES_PADDING = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")
HOST_WORK = ("get_rel_pos", "relative_position_bucket")
"""Methods of DeBERTa and MPNet that compute distances from the width, with copies from the host that no capture allows."""
MOST_GRAPHS = 32
"""Shapes that a slot keeps; a graph costs a few MB on the host."""
MOST_CAPTURES = 100
"""Captures of a run. Each takes 0.1 s, so data with more shapes is faster without."""
MOST_SLOTS = 4


class CudaCapture:
    """Captures work on the GPU."""

    device_type = "cuda"

    def new_pool(self) -> Any:
        """Return memory that several graphs can share."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run the work on another stream, so that libraries are initialized and nothing is captured that runs only once."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        """Wait for the device before a graph is freed."""
        torch.cuda.synchronize()

    def record(self, work: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        """Return a function that repeats the work, and its result, which every repetition overwrites."""
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool):
            result = work()
        return graph.replay, result

    def recover(self, device: torch.device) -> None:
        """Make the random generator usable after a capture that failed."""
        forget_broken_capture(device)


class NumbersOnDevice(TorchFunctionMode):
    """Lets `torch.tensor(0.0, device="cuda")`, as in transformers' masks, write there: no capture allows a copy from the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fill a scalar instead of copying it; any other call is unchanged."""
        given = kwargs or {}
        if func is torch.tensor and given.get("device") is not None and isinstance(args[0], (bool, int, float)):
            return torch.full((), args[0], **given)
        return func(*args, **given)


class Pending:
    """A forward pass; kept alive by its node in the autograd graph."""

    finished = False
    """Whether its backward pass ran."""


class Slot:
    """Memory for one forward pass and its backward pass."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.graphs: OrderedDict[Any, CapturedCall] = OrderedDict()
        self._last: Callable[[], Pending | None] = lambda: None

    def is_free(self) -> bool:
        """Return whether no backward pass will read the memory: the last one ran, or its loss was dropped."""
        last = self._last()
        return last is None or last.finished

    def begin(self) -> Pending:
        """Give the memory to a new forward pass."""
        pending = Pending()
        self._last = weakref.ref(pending)
        return pending

    def belongs_to(self, pending: Pending) -> bool:
        """Return whether the memory still contains this forward pass."""
        return self._last() is pending


class CapturedCall:
    """The forward and backward pass of an encoder for one shape of inputs. `.grad` of its leaves is fixed memory."""

    def __init__(
        self,
        run: Callable[[dict[str, torch.Tensor]], Any],
        tensors: Mapping[str, torch.Tensor],
        weights: Mapping[nn.Parameter, nn.Parameter],
        memory: Sequence[tuple[torch.Tensor, list[nn.Parameter]]],
        slot: Slot,
        capture: Any,
    ) -> None:
        self.slot, self._memory = slot, memory
        self._run, self._live = run, list[torch.Tensor]()
        self._inputs = {n: t.detach().clone() for n, t in tensors.items()}
        self._inputs["attention_mask"][:, -1:] = 0  # without padding, transformers skips the mask, but not in a capture
        for name, tensor in tensors.items():
            self._inputs[name].requires_grad_(tensor.requires_grad)
        for tensor in self._inputs.values():
            tensor.grad = torch.zeros_like(tensor) if tensor.requires_grad else None
        self._parameters, self._leaves = tuple(weights), (*self._inputs.values(), *weights.values())
        self._reached = list[set[torch.Tensor]]()
        """For each output: the leaves whose gradient depends on it."""
        capture.warm_up(self._rehearse)
        self._output_gradients = [torch.zeros_like(o) for o in self._live]
        self._replay_forward, self._outputs = capture.record(self._forward, slot.pool)
        self._replay_backward: Callable[[], None] | None = None
        if any(self._reached):
            self._replay_backward, _ = capture.record(self._backward, slot.pool)
        self._live = []

    def _rehearse(self) -> None:
        """Run both passes, and find which gradients each output has a part in."""
        self._forward()
        leaves = [leaf for leaf in self._leaves if leaf.requires_grad]
        for output in self._live:
            wanted = leaves if output.requires_grad else []
            given = torch.zeros_like(output)
            found = torch.autograd.grad(output, wanted, given, retain_graph=True, allow_unused=True) if wanted else ()
            self._reached.append({t for t, g in zip(wanted, found, strict=True) if g is not None})
        self._live = [output.detach() for output in self._live]

    def _forward(self) -> list[torch.Tensor]:
        enabled = torch.is_autocast_enabled(device := self._leaves[0].device.type)
        with torch.autocast(device, torch.get_autocast_dtype(device), enabled=enabled, cache_enabled=False):
            self._live, self._kind = pytree.tree_flatten(self._run(self._inputs))
        if not all(isinstance(t, torch.Tensor) for t in self._live):
            raise TypeError("the encoder returns something other than tensors")
        return [t.detach() for t in self._live]

    def _backward(self) -> None:
        """Compute all gradients. The activations stay, so that the pass can run again (`retain_graph=True`).

        Each gradient is added to the fixed memory when it is complete, so that the slot needs no memory for all of them.
        """
        wanted = [leaf for leaf in self._leaves if any(leaf in reached for reached in self._reached)]
        pairs = [(o, g) for o, g in zip(self._live, self._output_gradients, strict=True) if o.requires_grad]
        outputs, given = zip(*pairs, strict=True)
        for gradient in (*[flat for flat, _ in self._memory], *[t.grad for t in self._inputs.values()]):
            if gradient is not None:
                gradient.zero_()
        torch.autograd.backward(outputs, given, retain_graph=True, inputs=wanted)

    def __call__(self, tensors: Mapping[str, torch.Tensor], width: int) -> Any:
        """Return the first `width` columns of the encoder's output."""
        given = [tensors[name] for name in self._inputs]
        run: Any = _Replay.apply
        return pytree.tree_unflatten(run(self, self.slot.begin(), width, *given, *self._parameters), self._kind)

    def forward(self, width: int, given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of the outputs, and those among them without a gradient."""
        for place, tensor in zip(self._inputs.values(), given, strict=False):
            place.detach().copy_(tensor, non_blocking=True)
        self._replay_forward()
        copies = [_columns(output, width).clone(memory_format=torch.contiguous_format) for output in self._outputs]
        return copies, [copy for copy, reached in zip(copies, self._reached, strict=True) if not reached]

    def backward(self, pending: Pending, width: int, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return copies of the gradients; None for those that no output with a gradient depends on, as autograd does."""
        if not self.slot.belongs_to(pending):
            raise RuntimeError(
                "backward ran twice through one forward pass of the encoder, with another forward pass in between. "
                "CUDA graphs don't support this: set Trainer.use_speed_ups = False."
            )
        for place, gradient in zip(self._output_gradients, given, strict=True):
            place.zero_()
            if gradient is not None:
                _columns(place, width).copy_(gradient)
        assert self._replay_backward is not None
        self._replay_backward()
        pending.finished = True
        used = set().union(*(r for r, g in zip(self._reached, given, strict=True) if g is not None))
        copies = {t: t.grad.clone() for t in self._inputs.values() if t.grad is not None}
        for flat, weights in self._memory:
            copies |= zip(weights, _views(flat.clone(), weights), strict=True)
        return [copies[leaf] if leaf in used else None for leaf in self._leaves]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: CapturedCall, pending: Pending, width: int, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.pending, ctx.width = call, pending, width
        ctx.set_materialize_grads(False)
        found, fixed = call.forward(width, given)
        ctx.mark_non_differentiable(*fixed)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.call.backward(ctx.pending, ctx.width, given)


class GraphedEncoder:
    """The calls of one encoder. Whatever cannot be captured runs as it is."""

    def __init__(self, module: nn.Module, owner: ModelGraphs) -> None:
        self.module, self._owner = module, owner
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._fingerprint = Fingerprint(module)
        self._mark: Hashable = None
        self._pads = True
        """Whether further padding leaves the outputs as they are."""
        self._slots: list[Slot] = []
        self._aliases: dict[nn.Parameter, nn.Parameter] = {}
        """Parameter -> another one in the memory that the graphs read. Its `.grad` is the memory that they write to."""
        self._memory: list[tuple[torch.Tensor, list[nn.Parameter]]] = []
        """The memory of all gradients of one type, which is copied in one call, and their aliases."""
        self._plain: Callable[..., Any] = module.forward

    def enable(self) -> None:
        """Take over the calls of the module."""
        self._previous = vars(self.module).get("forward")
        self._plain = self.module.forward
        vars(self.module)["forward"] = self

    def disable(self) -> None:
        """Give the module its own forward back."""
        vars(self.module).pop("forward", None)
        if self._previous is not None:
            vars(self.module)["forward"] = self._previous

    def free(self) -> None:
        """Drop all graphs. Forward passes under way keep what they need."""
        if self._slots:
            self._owner.capture.synchronize()
        for slot in self._slots:
            slot.graphs.clear()
        self._slots, self._aliases, self._memory, self._mark = [], {}, [], None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the plain encoder: a teacher or an average of weights, made during a step, has no graphs."""
        return copy.deepcopy(self._plain, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the forward pass of the module returns."""
        if self._owner.off is not None or not torch.is_grad_enabled() or not self.module.training:
            return self._plain(*args, **kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tensors = {name: given.pop(name) for name in INPUTS if isinstance(given.get(name), torch.Tensor)}
        options = {name: given.pop(name) for name in OPTIONS if given.get(name) is not None}
        width, mark = self._width(tensors), self._fingerprint.of_call()
        why = "they don't pass rows of tokens on the GPU" if width is None else self._why_plain(given, mark)
        self._owner.skipped = self._owner.skipped or why
        if width is None or why is not None or not self._is_ready(mark, tensors, options):
            return self._plain(*args, **kwargs)
        padded = self._padded(tensors, self._wider(width))
        call = self._captured(padded, options)
        if call is None:
            return self._plain(*args, **kwargs)
        self._restore_places()
        return call(padded, width)

    def _why_plain(self, rest: Mapping[str, Any], mark: Hashable | None) -> str | None:
        """Return why a call with these further arguments is not captured; None if it can be."""
        name = next((n for n, v in rest.items() if v is not None and v is not False and n not in IGNORED), None)
        if name is not None:
            return f"they pass {name} to {type(self.module).__name__}"
        if self._previous is not None and "_original_forward" not in vars(self.module):
            return f"forward of {type(self.module).__name__} was replaced"  # by neither transformers nor accelerate
        return f"hooks listen to {type(self.module).__name__}" if mark is None else None

    def _width(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """Return the width of a batch of rows on the right device; None for any other arguments."""
        first = tensors.get("input_ids", tensors.get("inputs_embeds"))
        if first is None or first.ndim < 2:
            return None
        for name, tensor in tensors.items():
            dimensions = 3 if name == "inputs_embeds" else 2
            if tensor.ndim != dimensions or tensor.shape[:2] != first.shape[:2]:
                return None
            if tensor.device.type != self._owner.capture.device_type:
                return None
        return int(first.shape[1]) if first.numel() else None

    def _wider(self, width: int) -> int:
        """Return the width that a batch is padded to: one of few, and never more than the encoder has positions for."""
        wide = bucket_width(width)
        return wide if self._pads and wide <= most_positions(self.module.config) else width

    def _padded(self, tensors: Mapping[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
        """Return the inputs with further columns that the attention mask hides."""
        rows = dict(tensors)
        first = rows.get("input_ids", rows.get("inputs_embeds"))
        assert first is not None
        if "attention_mask" not in rows:
            rows["attention_mask"] = torch.ones(first.shape[:2], dtype=torch.long, device=first.device)
        extra = width - first.shape[1]
        pad: Any = self.module.config
        padded = {}
        for name, tensor in rows.items():
            value = (pad.pad_token_id or 0) if name == "input_ids" else 0
            padded[name] = functional.pad(tensor, (0, 0, 0, extra) if tensor.ndim == 3 else (0, extra), value=value)
        return padded

    def _is_ready(self, mark: Hashable, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> bool:
        """Return whether the encoder can be captured as it is now. The first time, and after a change, it is compared."""
        if mark != self._mark:
            self.free()
            wrong = why_not_captured_encoder(self.module) or self._prove(tensors, options)
            if wrong is not None:
                self._owner.close(wrong)
                return False
            self._mark = mark
        return True

    def _captured(self, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> CapturedCall | None:
        """Return the captured call for inputs of this shape; None if too many calls wait for their backward pass."""
        slot = next((slot for slot in self._slots if slot.is_free()), None)
        if slot is None:
            if len(self._slots) == MOST_SLOTS:
                return None
            slot = Slot(self._owner.capture.new_pool())
            self._slots.append(slot)
        device = self._owner.capture.device_type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        shapes = tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in tensors.items())
        key = (shapes, half, *options.items())
        if key in slot.graphs:
            slot.graphs.move_to_end(key)
            return slot.graphs[key]
        self._owner.captures += 1
        if self._owner.captures > MOST_CAPTURES:
            self._owner.close("the batches have too many different shapes")
            return None
        if len(slot.graphs) == MOST_GRAPHS:
            self._owner.capture.synchronize()
            slot.graphs.popitem(last=False)
        try:
            slot.graphs[key] = self._capture(tensors, options, slot)
        except RuntimeError:
            return None
        return slot.graphs[key]

    def _capture(self, tensors: dict[str, torch.Tensor], options: dict[str, Any], slot: Slot) -> CapturedCall:
        """Return a new captured call. If that fails, everything runs plain from then on."""
        self._restore_places()
        if not self._aliases:
            self._alias_weights()
        weights = {p: alias for p, alias in self._aliases.items() if alias.requires_grad}
        first = next(iter(tensors.values()))
        distances: dict[Any, Any] = {}

        def run(inputs: dict[str, torch.Tensor]) -> Any:
            with self._capturable(distances):
                return self._plain(**inputs, **options)

        capture = self._owner.capture
        with generators_unchanged(first.device):
            try:
                return CapturedCall(run, tensors, weights, self._memory, slot, capture)
            except Exception as error:  # of transformers, PEFT or CUDA: the plain call works
                capture.recover(first.device)
                self._owner.close(capture_failure(error))
                raise RuntimeError(capture_failure(error)) from error

    def _alias_weights(self) -> None:
        """Make the aliases of the weights, and the memory of their gradients."""
        self._aliases = {p: nn.Parameter(p.detach(), p.requires_grad) for p in self.module.parameters()}
        trained = [alias for alias in self._aliases.values() if alias.requires_grad]
        for dtype in dict.fromkeys(alias.dtype for alias in trained):
            same = [alias for alias in trained if alias.dtype == dtype]
            flat = torch.zeros(sum(alias.numel() for alias in same), dtype=dtype, device=same[0].device)
            for alias, view in zip(same, _views(flat, same), strict=True):
                alias.grad = view
            self._memory.append((flat, same))

    @contextmanager
    def _capturable(self, distances: dict[Any, Any]) -> Iterator[None]:
        """Let the module compute with the aliases of its weights, and with distances that are computed once."""

        def once(module: nn.Module, name: str) -> Callable[..., Any]:
            method, key = getattr(module, name), (module, name)

            def computed(*args: Any, **kwargs: Any) -> Any:
                if key not in distances:
                    found = method(*args, **kwargs)
                    distances[key] = None if found is None else found.to(next(iter(self._aliases)).device)
                return distances[key]

            return computed

        with ExitStack() as undo:
            undo.enter_context(NumbersOnDevice())
            for module in self.module.modules():
                table = module._parameters
                undo.callback(table.update, dict(table))
                table.update({n: self._aliases[p] for n, p in table.items() if p is not None})
                for name in HOST_WORK:
                    if hasattr(type(module), name):
                        undo.callback(replace_method(module, name, once(module, name)))
            yield

    @torch.no_grad()
    def _restore_places(self) -> None:
        """Move weights back to the memory that the graphs read, after `parameter.data = ...` put others in their place."""
        for parameter, alias in self._aliases.items():
            if parameter.data_ptr() != alias.data_ptr():
                alias.copy_(parameter)
                parameter.data = alias.data

    def _prove(self, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> str | None:
        """Return how captured calls differ from plain ones; None if they don't, with padding to few widths or without."""
        found = []
        for self._pads, real_only in ((True, False), (True, True), (False, False)):
            if not real_only or self._owner.ignores_padding:
                found.append(self._find_difference(tensors, options, real_only=real_only))
                if found[-1] is None or self._owner.off is not None:
                    return found[-1]
        return found[0]

    def _find_difference(
        self, tensors: dict[str, torch.Tensor], options: dict[str, Any], *, real_only: bool
    ) -> str | None:
        """Compare a captured call with the plain one on a few rows without dropout; return how they differ."""
        most, longest = most_positions(self.module.config), self._width(tensors)
        assert longest is not None
        width = min(longest, max(most - 16, 1))  # leaves columns to pad
        few = {n: t.detach()[:ROWS, :width].clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
        wide = bucket_width(width + 1) if self._pads and bucket_width(width + 1) <= most else width
        padded = self._padded(few, wide)
        real = padded["attention_mask"][:, :width, None] if real_only else 1
        device = self._owner.capture.device_type
        ambient = torch.is_autocast_enabled(device)
        named = {n: p for n, p in (*self.module.named_parameters(), *few.items()) if p.requires_grad}

        def measure(call: Callable[..., Any], *, half: bool) -> Gradients:
            with torch.autocast(device, torch.get_autocast_dtype(device), enabled=half, cache_enabled=False):
                found = call()
            outputs = float_tensors(found)
            return weighted_gradients([t.float() * real if t.ndim == 3 else t.float() for t in outputs], named)

        def captured() -> Any:
            return self._capture(padded, options, Slot(self._owner.capture.new_pool()))(padded, width)

        try:
            with nothing_left_behind(self.module, padded["attention_mask"].device):
                exact = measure(partial(type(self.module).forward, self.module, **few, **options), half=False)
                rounded = None
                if ambient or self._owner.half:
                    rounded = measure(partial(self._plain, **few, **options), half=ambient)
                wrong = failure(judge_by(exact, rounded), lambda: measure(captured, half=ambient))
        except torch.OutOfMemoryError:
            return "the comparison with the plain encoder needs more memory"
        return None if wrong is None else f"the captured encoder returns different results ({wrong})"


class ModelGraphs:
    """CUDA graphs of the encoders in a model, while it is active. `off` is the reason why there are none."""

    def __init__(self, model: nn.Module, *, half: bool = False, capture: Any = None) -> None:
        self.model, self.half, self.capture = model, half, capture or CudaCapture()
        self.captures = 0
        self.skipped: str | None = None
        """Why some training calls were not captured."""
        kinds = {type(m) for m in model.modules() if type(m).__module__.startswith("transformers.models.")}
        self.ignores_padding = any(kind.__name__.endswith(IGNORES_PADDING) for kind in kinds)
        """Whether the head reads nothing at padding. There, DeBERTa's outputs depend on the width."""
        self._active = False
        with own_forward(model):
            encoders = {encoder: why_not_captured_encoder(encoder) for encoder in encoders_of(model)}
        self.off: str | None = None
        self._encoders = [GraphedEncoder(encoder, self) for encoder, why in encoders.items() if why is None]
        if not self._encoders:
            why = next((why for why in encoders.values() if why is not None), None)
            self.off = why or f"{type(model).__name__} contains no encoder of transformers"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replay the training calls of the encoders inside this block."""
        if self._active or self.off is not None:
            yield
            return
        self._active = True
        for encoder in self._encoders:
            encoder.enable()
        try:
            yield
        finally:
            for encoder in self._encoders:
                encoder.disable()
            self._active = False

    def close(self, reason: str) -> None:
        """Run everything as it is from now on."""
        self.off = self.off or reason
        self.free()

    def free(self) -> None:
        """Drop all graphs; the next call captures again."""
        self.captures = 0
        for encoder in self._encoders:
            encoder.free()


def encoders_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost encoders in a model: `BertModel` and whatever else `AutoModel` creates, without their heads."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = {n for found in MODEL_MAPPING_NAMES.values() for n in ((found,) if isinstance(found, str) else found)}
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        kind = type(module)
        if module not in inside and kind.__name__ in names and kind.__module__.startswith("transformers.models."):
            found.append(module)
            inside |= set(module.modules())
    return found


def most_positions(config: Any) -> int:
    """Return the largest number of columns that a model of this configuration has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return 2**31
    family = FAMILIES.get(str(config.model_type))
    first = 0 if family is not None and not family.positions_follow_padding else (config.pad_token_id or 0) + 1
    return positions - first


def why_not_captured_encoder(encoder: nn.Module) -> str | None:
    """Return why an encoder is not captured; None if it can be tried."""
    config: Any = encoder.config
    if getattr(encoder, "is_gradient_checkpointing", False):
        return "gradient checkpointing repeats layers"
    if getattr(config, "is_encoder_decoder", False):
        return f"{type(encoder).__name__} has a decoder"
    if getattr(config, "_attn_implementation", "eager") not in ("eager", "sdpa"):
        return f"{config._attn_implementation} reads the lengths of rows back from the GPU"
    return why_not_by_config(encoder) or why_not_original(encoder, ())


def _views(flat: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return pieces of a flat tensor in the shapes of these weights."""
    pieces = torch.split(flat, [weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]


def _columns(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return an output (rows, columns, size) without the columns that were added; others as they are."""
    return tensor[:, :width] if tensor.ndim == 3 else tensor
