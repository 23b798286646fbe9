"""ARPA files become shards; shards answer queries."""
