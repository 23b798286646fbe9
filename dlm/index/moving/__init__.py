"""Makes a shard set from another one of the same model, with another slot table."""
