"""Finds and loads a pretrained encoder, gives it a head, groups its parameters (home of `transformers`)."""
