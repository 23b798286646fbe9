"""Scores running text by a whole model in one process: the state is carried from word to word."""
