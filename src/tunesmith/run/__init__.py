"""The run folder: its paths, journal, lock, sealed folders, environment."""
