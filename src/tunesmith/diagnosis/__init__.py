"""Learning curves become findings with evidence and a next step."""
