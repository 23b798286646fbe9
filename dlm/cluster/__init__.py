"""Starts and watches a cluster on one machine."""
