"""The training loop as a stream of events, checkpoints, and the processes of a run."""
