"""Turns a batch into messages to shards, and tracks where the shards are."""
