"""Approximates a model by an n-gram model: expected n-gram counts, then weights from a KL step."""
