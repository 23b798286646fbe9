"""OpenTelemetry spans of calls and their messages, if the extra `trace` is installed.

Nothing of OpenTelemetry is imported until a `Tracer` is made. A span holds numbers and results;
never words, ids, addresses or error messages. Of the caller's context only W3C's `traceparent`
and `tracestate` travel; baggage, which may hold anything, is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dlm.errors import ConfigError
from dlm.extras import packages_of, pip_install

Metadata = tuple[tuple[str, str], ...]
Number = int | float | str
FIELDS = ("traceparent", "tracestate")


class Tracer:
    """Makes spans with the process's OpenTelemetry set-up; ConfigError if that is not installed."""

    def __init__(self, version: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as exc:
            raise ConfigError(
                "trace is on, but OpenTelemetry is not installed; turn trace off, or run\n"
                f"  {pip_install(packages_of('trace'))}"
            ) from exc
        self._api = trace
        self._tracer = trace.get_tracer("dlm", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, **attributes: Number) -> Span | None:
        """Begins a caller's span below the current one; returns None if it is not recorded."""
        span = self._tracer.start_span(
            name, kind=self._api.SpanKind.CLIENT, attributes=_named(attributes)
        )
        return Span(self._api, span) if span.is_recording() else None

    def proceed(
        self, name: str, metadata: Iterable[tuple[str, Any]], **attributes: Number
    ) -> Span | None:
        """Begins a span that continues the sampled context in `metadata`, or returns None."""
        carrier = {k: v for k, v in metadata if k in FIELDS and isinstance(v, str)}
        if not carrier:
            return None
        context = self._propagator.extract(carrier)
        if not self._api.get_current_span(context).get_span_context().trace_flags.sampled:
            return None
        span = self._tracer.start_span(
            name, context, self._api.SpanKind.SERVER, attributes=_named(attributes)
        )
        return Span(self._api, span)

    def metadata(self, span: Span) -> Metadata:
        """The metadata that carries `span` to a server."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._api.set_span_in_context(span.span))
        return tuple(carrier.items())


class Span:
    """A span that is recorded; the caller ends it once, on any thread."""

    __slots__ = ("_api", "span")

    def __init__(self, api: Any, span: Any) -> None:
        self._api = api
        self.span = span

    @property
    def sampled(self) -> bool:
        """Whether servers should record spans below this one."""
        return bool(self.span.get_span_context().trace_flags.sampled)

    def end(self, result: str, **attributes: Number) -> None:
        """Ends the span; `result` is "ok", or a name from a closed set."""
        self.span.set_attributes(_named({**attributes, "result": result}))
        if result != "ok":
            self.span.set_status(self._api.Status(self._api.StatusCode.ERROR, result))
        self.span.end()


def _named(attributes: Mapping[str, Number]) -> dict[str, Number]:
    return {f"dlm.{name}": value for name, value in attributes.items()}
