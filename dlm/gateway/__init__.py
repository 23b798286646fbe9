"""Serves a model's scores to any program, over gRPC and over HTTP with JSON, from one contract."""
