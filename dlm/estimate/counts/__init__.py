"""Counts the n-grams of text."""
