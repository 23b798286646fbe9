"""Carries what is asked of shards there and back, on the loop."""
