"""Declares families of metrics. Each part declares its families once and creates metrics from them;
the reference and the tests of dashboards and alerts read the same declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)


class Family(NamedTuple):
    """The meaning and the labels of a family; a family with the label `le` is a histogram."""

    meaning: str
    labels: tuple[str, ...] = ()


def family(families: Mapping[str, Family], name: str) -> Any:
    """Returns family `name`, without samples: a counter (`..._total`), histogram or gauge."""
    meaning, labels = families[name]
    kind: Any = GaugeMetricFamily
    if "le" in labels:
        kind = HistogramMetricFamily
    elif name.endswith("_total"):
        kind, name = CounterMetricFamily, name.removesuffix("_total")
    return kind(name, meaning, labels=tuple(label for label in labels if label != "le"))
