"""Curves -> findings: what they show, with the evidence and the next action."""
