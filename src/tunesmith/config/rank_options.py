"""Options about several devices. How many there are is the launcher's matter (torchrun, accelerate launch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Many devices"""

    ddp_timeout: int = 1800
    """Seconds that a rank waits for the others in an exchange before it gives them up."""

    fsdp: bool | str | None = None
    """Deal weights, gradients and optimizer state out over the ranks: full_shard, or shard_grad_op. Default: a copy each."""

    fsdp_config: dict[str, Any] | None = None
    """Options of fsdp, such as transformer_layer_cls_to_wrap and reshard_after_forward."""
