"""Adjusted counts of every order, from counted n-grams."""
