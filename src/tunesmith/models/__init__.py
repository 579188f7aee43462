"""Find and load a pretrained encoder; pooling, head and parameter groups."""
