"""Turns audio into words, and measures how many of them are right."""
