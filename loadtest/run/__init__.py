"""Sends a trace to servers: clients, clocks, faults."""

INTERRUPTED = "interrupted"  # why a run ended, after Ctrl-C
