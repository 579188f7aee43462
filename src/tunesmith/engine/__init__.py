"""The training loop as events: forward, backward, judge, update, zero; schedule, losses, evaluation, stopping."""
