"""Turns ARPA files into shards, and answers queries from shards."""
