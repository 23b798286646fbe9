"""What a client is told: its settings, its credentials and cluster.toml. No gRPC here."""
