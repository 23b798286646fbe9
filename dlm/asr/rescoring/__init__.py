"""Lattices and n-best lists: read, rescored, written."""
