"""Turns shard sets back into n-grams, to compare, verify and export them."""
