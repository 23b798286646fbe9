"""Numbers in as few bits as they need: how the columns of a shard set are packed and read."""
