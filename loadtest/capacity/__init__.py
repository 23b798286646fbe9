"""Measures or simulates how many servers a load needs."""
