"""Trains models privately on users' text: sampling, noise, accounting and the network itself."""
