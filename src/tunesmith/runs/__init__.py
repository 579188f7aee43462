"""The run folder: paths, event log, lock, manifest, environment."""
