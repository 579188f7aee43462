"""Predictions from a trained model: Predictor, bulk prediction, export, HTTP service, board."""
