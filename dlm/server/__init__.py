"""The server of one shard: the process that answers clients' messages."""

import dlm.wire.grpc_setup  # noqa: F401  # before gRPC
