"""The options of a run: one table, read from flags and files, checked with all problems reported together."""
