"""Prediction over many files by several processes that share one output folder; the same command resumes it."""
