"""Fits the model that is nearest to counts, on given or inferred n-grams."""
