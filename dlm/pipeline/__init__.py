"""From users' text to a shard set: runs the stages of private training in order."""
