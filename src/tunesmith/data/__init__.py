"""Files, Hub datasets and tables in memory become audited, tokenized batches of examples."""
