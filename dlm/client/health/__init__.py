"""Whether servers are there, and which model answers."""
