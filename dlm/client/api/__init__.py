"""What a program calls: clients, their handles and settings."""
