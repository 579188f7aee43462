"""The `tunesmith` command: one file per verb, and the console that shows a run."""
