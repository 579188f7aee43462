"""Adapters for Ray Data and Spark."""
