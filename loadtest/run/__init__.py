"""Sending a trace to servers: clients, clocks, faults."""
