"""Triton kernels for fused layers, packed attention and AdamW. Import a module of this package only if Triton is installed."""
