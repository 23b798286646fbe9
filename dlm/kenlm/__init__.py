"""Reads and scores KenLM's binary files in place, and turns them back into n-grams."""
