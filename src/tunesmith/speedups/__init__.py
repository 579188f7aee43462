"""Exact speedups: each changes how a step is computed, not what, and verifies itself on the first batch."""
