"""Turns a batch into messages to shards, and knows where the shards are."""
