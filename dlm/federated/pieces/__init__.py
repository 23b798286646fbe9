"""Wordpieces, made from counts of words."""
