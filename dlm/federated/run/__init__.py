"""Rounds over users: the choice of users, and the folder from which rounds resume."""
