"""One training session: reads, prepares, trains, evaluates and exports a run."""
