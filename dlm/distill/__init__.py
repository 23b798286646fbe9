"""Approximates a model by an n-gram model: computes expected counts, then fits weights to them."""
