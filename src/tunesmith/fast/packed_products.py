"""Matrix products of a model that only predicts, on a CPU: weights laid out once as oneDNN wants them, GELU in the same pass.

With weights that change this would not pay: they would be laid out anew each step. MiniLM-L6, 200 rows of MRPC, one core:
2.38 s to 2.28 s. It costs a second copy of the matrices.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tunesmith.fast.cpu_speed import QuickLinear

ENOUGH_ROWS = 64
"""Below, the call costs more than the product."""
TYPICAL_ROWS = 4096


class PackedLinear(QuickLinear):
    """`nn.Linear`, followed by GELU where `gelu` is set."""

    packed: torch.Tensor
    gelu: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        plain = input.device.type == "cpu" and input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if rows < ENOUGH_ROWS or not plain or torch.is_grad_enabled():
            out = super().forward(input)
            return functional.gelu(out) if self.gelu else out
        flat = input.reshape(rows, self.in_features)
        kind, how = ("gelu", "none") if self.gelu else ("none", "")
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, kind, [], how)
        return found.view(*input.shape[:-1], self.out_features)


def pack_products(model: nn.Module) -> int:
    """Changes the model's products for good; how many were changed. Its weights must not change afterwards."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0
    count = 0
    for module in model.modules():
        if type(module) is QuickLinear and module.weight.dtype == torch.float32 and module.out_features >= ENOUGH_ROWS:
            with torch.inference_mode():
                packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), TYPICAL_ROWS)
            module.__class__ = PackedLinear
            assert isinstance(module, PackedLinear)
            module.packed, module.gelu = packed, False
            count += 1
    for module in model.modules():
        dense, activation = getattr(module, "dense", None), getattr(module, "intermediate_act_fn", None)
        if isinstance(dense, PackedLinear) and callable(activation) and _is_gelu(activation):
            dense.gelu = True
            module.intermediate_act_fn = nn.Identity()
    return count


def _is_gelu(activation: object) -> bool:
    """By what it computes: transformers has several by that name, and some are approximations."""
    probe = torch.linspace(-8.0, 8.0, 257)
    with torch.inference_mode():
        return callable(activation) and torch.equal(activation(probe), functional.gelu(probe))
