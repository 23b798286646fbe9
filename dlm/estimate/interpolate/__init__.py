"""Computes probabilities and backoff weights from adjusted counts."""
