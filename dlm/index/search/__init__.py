"""Answers queries from mapped files: a shard, the low orders, or a whole set in one process."""
