"""A trained model folder -> predictions for new rows, in input order, as tables."""
