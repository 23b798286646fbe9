"""Whether servers can be reached, and which model answers."""
