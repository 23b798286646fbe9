"""Adjusted counts to probabilities and backoff weights."""
