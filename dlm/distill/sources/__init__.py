"""What is imitated: networks, models in Python, backoff models."""
