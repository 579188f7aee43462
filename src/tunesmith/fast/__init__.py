"""Exact speed-ups: each changes how a step is computed, not what, and proves itself on the first batch."""
