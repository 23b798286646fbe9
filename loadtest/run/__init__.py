"""Sends a trace to servers: clients, clocks, faults."""

INTERRUPTED = "interrupted"  # the reason given if Ctrl-C ended a run
