"""Sorts rows and keeps columns on disk, within a memory limit."""
