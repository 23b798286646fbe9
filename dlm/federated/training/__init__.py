"""Trains a network on users' text, in rounds."""
