"""What a program calls: clients, their utterances and settings."""
