"""Compile every GPU kernel to machine code, without a GPU; tests run this in a separate process."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tunesmith.speedups.kernels import adamw, attention, layers

HALF, FLOAT, DOUBLE, INT, LONG, INTS, NUMBER = "*bf16", "*fp32", "*fp64", "i32", "*i64", "*i32", "fp32"
BLOCK = {"BLOCK": 1024, "DROP": True, "COPY": True}
TILE = {"ROWS": 32, "COLUMNS": 128}
SCORES = {"TILE": 16, "WIDTH": 128}
SUM = {"BLOCK": 1024, "DROP": True, "TOTAL": True, "BETA": True}
GATED = {"ROWS": 16, "COLUMNS": 128, "DROP": True}
HEAD = {"D": 64, "TILE": 64, "DROP": True}
SHORT = {"D": 64, "DROP": True, "NEAR": False}
KERNELS: list[tuple[Any, list[str], dict[str, Any]]] = [
    (
        layers._add_norm_forward,
        [HALF, *[FLOAT] * 4, LONG, FLOAT, HALF, HALF, FLOAT, INT, INT, NUMBER, NUMBER],
        {**BLOCK, "KEEP": True},
    ),
    (
        layers._add_norm_backward,
        [FLOAT, HALF, HALF, FLOAT, LONG, FLOAT, HALF, FLOAT, FLOAT, INT, INT, INT, NUMBER],
        BLOCK,
    ),
    (layers._bias_gelu_forward, [HALF, FLOAT, HALF, INT, INT], TILE),
    (layers._bias_gelu_backward, [HALF, HALF, FLOAT, HALF, HALF, FLOAT, INT, INT], TILE),
    *(
        (
            attention._forward,
            [*[HALF] * 4, FLOAT, LONG, INTS, INTS, INT, NUMBER, NUMBER, *[INT] * 5],
            {**HEAD, "NEAR": near},
        )
        for near in (False, True)
    ),
    *(
        (
            attention._backward,
            [*[HALF] * 5, FLOAT, *[HALF] * 3, LONG, INTS, INTS, INT, NUMBER, NUMBER, *[INT] * 6],
            {**HEAD, "NEAR": near},
        )
        for near in (False, True)
    ),
    *(
        (kernel, [*[HALF] * tensors, LONG, INTS, INTS, INT, NUMBER, NUMBER, *[INT] * 4], {**SHORT, **sizes})
        for kernel, tensors in ((attention._short_forward, 4), (attention._short_backward, 7))
        for sizes in (
            {"LOW": 0, "KEYS": 64, "QUERIES": 64},
            {"LOW": 64, "KEYS": 128, "QUERIES": 32},
            {"LOW": 64, "KEYS": 128, "QUERIES": 128},
        )
    ),
    (attention._lay, [HALF, HALF, INTS, INT, INT, INT], {"TILE": 64, "SIZE": 64, "BACK": False}),
    (
        attention._weigh_forward,
        [*[HALF] * 3, FLOAT, INTS, LONG, HALF, HALF, *[INT] * 4, NUMBER, NUMBER],
        {**SCORES, "KEY": True, "QUERY": True, "BIAS": True, "DROP": True},
    ),
    (
        attention._weigh_backward,
        [HALF, HALF, INTS, LONG, HALF, HALF, *[INT] * 4, NUMBER, NUMBER],
        {**SCORES, "KEY": True, "DROP": True},
    ),
    (attention._skew, [HALF, HALF, INTS, INT, INT, INT], SCORES),
    (adamw._advance, [LONG, DOUBLE, FLOAT, FLOAT], {}),
    (
        layers._sum_norm_forward,
        [HALF, *[FLOAT] * 3, LONG, FLOAT, HALF, HALF, FLOAT, INT, INT, NUMBER, NUMBER],
        {**SUM, "KEEP": True},
    ),
    (
        layers._sum_norm_backward,
        [FLOAT, HALF, HALF, FLOAT, LONG, FLOAT, HALF, FLOAT, FLOAT, INT, INT, INT, NUMBER],
        SUM,
    ),
    (layers._geglu_forward, [HALF, LONG, HALF, INT, INT, INT, NUMBER], GATED),
    (layers._geglu_backward, [HALF, HALF, LONG, HALF, HALF, INT, INT, INT, NUMBER], GATED),
    (layers._rotate, [HALF, FLOAT, FLOAT, INT, INT], {"HEADS": 32, "HALF": 32, "BACK": True}),
    (
        adamw._update,
        [LONG, LONG, LONG, *[FLOAT] * 4],
        {"CHUNK": 8192, "BLOCK": 1024, "HALF": triton.language.bfloat16},
    ),
]


def main(capability: int) -> None:
    """Print the name of each kernel and the size of its machine code in bytes."""
    for kernel, types, constants in KERNELS:
        left = iter(types)
        signature = {name: "constexpr" if name in constants else next(left) for name in kernel.arg_names}
        assert next(left, None) is None, f"{kernel.__name__} has fewer arguments"
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(kernel.__name__, len(made.asm["cubin"]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
