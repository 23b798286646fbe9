"""The metric families that servers, clients and gateways show, with their labels."""

from __future__ import annotations

from dlm.client import metrics as client
from dlm.gateway import metrics as gateway
from dlm.server import metrics as server

HISTOGRAM = ("_bucket", "_sum", "_count")

# What Prometheus adds to every series, and what it makes itself.
TARGET = frozenset({"job", "instance"})
OWN = {"up": frozenset[str]()}


def series() -> dict[str, frozenset[str]]:
    """Every series by its name in queries, and its labels; a histogram is three."""
    families: dict[str, tuple[str, ...]] = {}
    for name, (_, labels) in (server.FAMILIES | client.FAMILIES | gateway.FAMILIES).items():
        for ending in HISTOGRAM if "le" in labels else ("",):
            extra = ("le",) if ending == "_bucket" else ()
            families[name + ending] = (*(x for x in labels if x != "le"), *extra)
    return {name: frozenset(labels) | TARGET for name, labels in families.items()} | {
        name: labels | TARGET for name, labels in OWN.items()
    }
