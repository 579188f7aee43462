"""int8 graphs, from the quickest kind to the safest: dynamic, per channel, static, then with sensitive layers left in float."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GROUPS = 8
LEFT_OUT = (1, 2, 4)
"""Numbers of groups of products, of eight, that stay in float, the most sensitive first."""
Feed = list[dict[str, npt.NDArray[Any]]]


@dataclass(frozen=True)
class Candidate:
    """A way to quantise: `write(graph)` writes it."""

    name: str
    write: Callable[[Path], None]


class _Calibration:
    """Batches of training rows, as onnxruntime asks for them."""

    def __init__(self, feed: Feed) -> None:
        self._left = iter(feed)

    def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
        return next(self._left, None)


def candidates(
    graph: Path, feed: Feed, change: Callable[[Path], float], scratch: Path, *, static_only: bool
) -> Iterator[Candidate]:
    """In the order they are tried. `static_only`: OpenVINO computes in int8 where scales are in the graph."""
    if not static_only:
        yield Candidate("dynamic", partial(_dynamic, graph, per_channel=False))
        yield Candidate("dynamic per channel", partial(_dynamic, graph, per_channel=True))
    yield Candidate("static", partial(_static, graph, feed=feed))
    groups = _sensitive_groups(graph, change, scratch)
    for count in LEFT_OUT:
        left = [name for group in groups[:count] for name in group]
        write = partial(_static, graph, feed=feed) if static_only else partial(_dynamic, graph, per_channel=True)
        kind = "static" if static_only else "dynamic per channel"
        yield Candidate(f"{kind}, {len(left)} products in float", partial(write, exclude=left))


def strip_shapes(graph: Path) -> None:
    """Removes stored shapes, which no longer fit after the quantiser has transposed weights. They are inferred again."""
    import onnx

    model = onnx.load(str(graph))
    del model.graph.value_info[:]
    onnx.save(model, str(graph))


def _dynamic(graph: Path, to: Path, *, per_channel: bool, exclude: list[str] | None = None) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet_root():
        # 7-bit weights: the u8 x s8 products of CPUs without VNNI add two of them in 16 bits, which 8 bits overflow.
        quantize_dynamic(
            graph,
            to,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=per_channel,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=exclude or [],
        )


def _static(graph: Path, to: Path, *, feed: Feed, exclude: list[str] | None = None) -> None:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    with _quiet_root():
        quantize_static(
            graph,
            to,
            _Calibration(feed),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            nodes_to_exclude=exclude or [],
            extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
        )


def _sensitive_groups(graph: Path, change: Callable[[Path], float], scratch: Path) -> list[list[str]]:
    """Products of the graph in groups by their place; the group whose quantisation changes the answers most comes first."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    constants = {tensor.name for tensor in model.graph.initializer}
    products = [
        node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm") and set(node.input) & constants
    ]
    groups = [list(part) for part in np.array_split(np.array(products, dtype=object), min(GROUPS, len(products)))]
    found = []
    for number, group in enumerate(groups):
        to = scratch / f"group-{number}.onnx"
        _dynamic(graph, to, per_channel=True, exclude=[name for name in products if name not in group])
        found.append((change(to), number))
        to.unlink()
    return [groups[number] for _, number in sorted(found, reverse=True)]


@contextmanager
def _quiet_root() -> Iterator[None]:
    """onnxruntime's tools log through the root logger."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
