"""Python for people who think in fit and predict: `finetune` on tables in memory, estimators, what a notebook shows."""
