"""Carries requests to shards and replies back, on the loop."""
