"""Rows -> findings before the first step: repeats, leaks between splits, labels, giveaways, texts a tokenizer cannot read."""
