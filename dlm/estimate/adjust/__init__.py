"""Computes the adjusted counts of every order from counted n-grams."""
