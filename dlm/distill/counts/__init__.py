"""Counts how often a source is expected to say each n-gram."""
