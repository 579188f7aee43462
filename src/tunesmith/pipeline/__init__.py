"""One training run from config to report."""
