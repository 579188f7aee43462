"""Dropout masks on the CPU, several times quicker than torch draws them (decisions/0104)."""

from __future__ import annotations

import numpy as np
import torch


def draw_keep_mask(size: int, drop: float) -> torch.Tensor:
    """float32 (size): 0 with probability `drop`, else `1 / (1 - drop)`.

    torch draws 53 random bits for each element of a mask; 32 decide as well (the probability is off by 2**-33 at most).
    They come from SFC64 at half the cost of torch's generator, which gives the seed: its state is all that a resume or a
    recomputation needs.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_())
    bits = torch.from_numpy(np.random.SFC64(seed).random_raw((size + 1) // 2).view(np.int32))[:size]
    mask = torch.empty(size)
    # int32 spans [-2**31, 2**31): a share 1 - drop of it lies below this bound.
    torch.lt(bits, round((1.0 - drop) * 2**32) - 2**31, out=mask)
    return mask.mul_(1.0 / (1.0 - drop))
