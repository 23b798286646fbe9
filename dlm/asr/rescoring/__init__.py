"""Reads, rescores and writes lattices and n-best lists."""
