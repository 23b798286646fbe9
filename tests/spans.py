"""Spans of this process, in memory: OpenTelemetry takes one provider a process; tests share it."""

from __future__ import annotations

from typing import Any


def recorder() -> Any:
    """What has every span that ends from now on; an `InMemorySpanExporter`."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1.0))
        trace.set_tracer_provider(provider)
    found = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    return found
