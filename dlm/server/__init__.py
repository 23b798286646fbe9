"""One shard, answering: the process that a client's messages arrive at."""
