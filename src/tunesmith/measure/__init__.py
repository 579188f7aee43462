"""Speed on the user's own model, data and machine, beside transformers.Trainer and a plain loop."""
