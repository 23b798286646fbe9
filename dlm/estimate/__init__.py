"""Estimates ARPA models from text; prunes, merges and filters them."""
