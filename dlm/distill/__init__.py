"""Approximates a model by an n-gram model: expected n-gram counts, then weights by a KL step."""
