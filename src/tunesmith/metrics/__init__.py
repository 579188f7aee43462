"""Scores and what they are worth: every metric with its n and a 95% interval. No torch, no network."""
