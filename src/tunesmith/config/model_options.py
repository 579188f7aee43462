"""Options about the model: which one, what of it is trained, and how its forward pass is made fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AutoOnOff = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model"""

    model_name_or_path: str | None = None
    """Folder or Hub id of a pretrained encoder. Default: the embedded all-MiniLM-L6-v2."""

    config_name: str | None = None
    """Folder or Hub id of another model config. Default: that of the model."""

    tokenizer_name: str | None = None
    """Folder or Hub id of another tokenizer. Default: that of the model."""

    model_revision: str = "main"
    """Branch, tag or commit of a Hub model."""

    ignore_mismatched_sizes: bool = False
    """Start a head of another size afresh instead of refusing the model."""

    allow_download: bool = True
    """Fetch a Hub id that is not on disk. Local paths and the embedded model never touch the network."""

    freeze: tuple[str, ...] = ()
    """Parts that are not trained: embeddings, encoder (all but the head), layers.3 or layers.0-3."""

    layerwise_lr_decay: float = 1.0
    """Learning rate of each layer relative to the layer above it. 1.0: the same for all."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """Precision and speed"""

    bf16: bool | None = None
    """Compute in bfloat16 where it is safe; weights stay float32. Default: yes on a GPU that has it, no on a CPU."""

    fp16: bool = False
    """Compute in float16 with loss scaling where it is safe; weights stay float32. Needs a GPU."""

    tf32: bool | None = None
    """Allow TF32 matrix products on NVIDIA GPUs. Default: as torch is set."""

    use_cpu: bool = False
    """Train on the CPU although a GPU is there."""

    padding_free: AutoOnOff = "auto"
    """Compute no padding tokens at all; the result is the same."""

    restrict_vocabulary: AutoOnOff = "auto"
    """Keep only the embedding rows that occur in the data while training; the result is the same."""

    cls_only_last_layer: AutoOnOff = "auto"
    """Compute the last layer for the first token alone where the head reads nothing else; the result is the same."""

    fused_layers: AutoOnOff = "auto"
    """On a GPU in bf16 or fp16: layers in few kernels that read and write less; the result is the same."""

    cuda_graphs: AutoOnOff = "auto"
    """On one GPU: capture whole steps as CUDA graphs, one for each size of batch; the result is the same."""

    torch_compile: bool = False
    """Compile the model with torch.compile."""

    torch_compile_backend: str | None = None
    """Backend of torch.compile. Default: inductor."""

    torch_compile_mode: str | None = None
    """Mode of torch.compile, such as reduce-overhead. Default: torch's own."""

    auto_find_batch_size: bool = True
    """When memory runs out, split the batch and accumulate: the same maths in smaller pieces."""
