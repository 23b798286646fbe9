"""Families of metrics: each part declares its families once, and creates its metrics from these
declarations. The reference and the tests of dashboards and alerts read the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)


class Family(NamedTuple):
    """The meaning and the labels of a family; families with `le` are histograms."""

    meaning: str
    labels: tuple[str, ...] = ()


def family(families: Mapping[str, Family], name: str) -> Any:
    """The family of that name, without samples: a counter (`..._total`), histogram or gauge."""
    meaning, labels = families[name]
    kind: Any = GaugeMetricFamily
    if "le" in labels:
        kind = HistogramMetricFamily
    elif name.endswith("_total"):
        kind, name = CounterMetricFamily, name.removesuffix("_total")
    return kind(name, meaning, labels=tuple(label for label in labels if label != "le"))
