"""Rows -> tokens -> batches: tokenizer, token store, the order of an epoch, padding (home of `tokenizers`)."""
