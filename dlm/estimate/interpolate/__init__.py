"""Probabilities and backoff weights, from adjusted counts."""
