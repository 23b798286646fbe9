"""Runs the stages of private training in order, from users' text to a shard set."""
