"""From users' text to a shard set: the stages of private training, one after the other."""
