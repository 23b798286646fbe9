"""Shard sets back to n-grams: what is compared, verified and exported."""
