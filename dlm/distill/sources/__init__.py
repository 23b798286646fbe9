"""Sources that are approximated: networks, models in Python, backoff models."""
