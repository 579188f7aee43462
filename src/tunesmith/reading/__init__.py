"""Files, Hub datasets and tables in memory -> labelled rows; errors carry file, row and column (home of `datasets`)."""
