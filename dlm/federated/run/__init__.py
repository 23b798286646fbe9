"""Rounds over users: who takes part, and the folder from which they resume."""
