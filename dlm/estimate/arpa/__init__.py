"""Probabilities and backoff weights to ARPA text."""
