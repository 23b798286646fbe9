"""Python on one side, the messages of proto/dlm/v1/shard.proto on the other."""
