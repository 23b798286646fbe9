"""Counts how often users use each word of a list."""
