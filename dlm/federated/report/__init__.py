"""The guarantee of a run, in words and in figures."""
