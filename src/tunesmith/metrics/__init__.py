"""Every metric with its number of examples and a 95% interval. Needs no torch."""
