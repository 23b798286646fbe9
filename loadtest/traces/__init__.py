"""Traces of decoders' requests and their times: recorded, synthesised, scheduled, routed."""
