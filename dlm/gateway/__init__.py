"""Serves a model's scores to any language, over gRPC and over HTTP with JSON, from one contract."""
