"""The `tunesmith` command: one file a verb, and the console that shows a run."""
