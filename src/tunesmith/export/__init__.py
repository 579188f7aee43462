"""A trained model in other formats: measured against the original on the run's own rows before it is published."""
