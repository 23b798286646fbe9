"""The server of one shard: the process that answers clients' messages."""
