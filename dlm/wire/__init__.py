"""Converts between Python objects and the messages of proto/dlm/v1/shard.proto."""
