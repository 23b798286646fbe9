"""Rounds of federated learning between processes: the transport, and secure aggregation over it."""
