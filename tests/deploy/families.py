"""The metric families that servers and clients show, with their labels."""

from __future__ import annotations

import importlib
from typing import Any

SERVER = ("model", "shard_set", "shard", "worker")
HISTOGRAM = ("_bucket", "_sum", "_count")

# To be replaced: the names agreed on, for as long as neither module has its own FAMILIES.
_AGREED: dict[str, tuple[str, ...]] = {
    "dlm_server_requests_total": (*SERVER, "result"),
    "dlm_server_queries_total": SERVER,
    "dlm_server_matched_order_total": (*SERVER, "order"),
    "dlm_server_batch_queries": (*SERVER, "le"),
    "dlm_server_stage_seconds": (*SERVER, "stage", "le"),
    "dlm_server_in_flight": SERVER,
    "dlm_server_streams": SERVER,
    "dlm_server_downloads": SERVER,
    "dlm_server_state": (*SERVER, "state"),
    "dlm_server_memory_bytes": SERVER,
    "dlm_server_worker_restarts_total": SERVER,
    "dlm_server_info": (*SERVER, "version"),
    "dlm_client_queries_total": ("source",),
    "dlm_client_calls_total": ("result",),
    "dlm_client_messages_total": ("result",),
    "dlm_client_message_queries": ("le",),
    "dlm_client_gathered_calls": ("le",),
    "dlm_client_stage_seconds": ("stage", "le"),
    "dlm_client_in_flight": ("shard",),
    "dlm_client_waiting": ("shard",),
    "dlm_client_cache_bytes": (),
    "dlm_client_info": ("version",),
}
# What Prometheus adds to every series, and what it makes itself.
TARGET = frozenset({"job", "instance"})
OWN = {"up": frozenset[str]()}


def _declared(module: str) -> dict[str, Any] | None:
    try:
        return getattr(importlib.import_module(module), "FAMILIES", None)
    except ModuleNotFoundError:
        return None


def series() -> dict[str, frozenset[str]]:
    """Every series by its name in queries, and its labels; a histogram is three.

    From FAMILIES of dlm.server.metrics and dlm.client.metrics (name -> labels) where they are.
    """
    families: dict[str, tuple[str, ...]] = {}
    for module, prefix in (
        ("dlm.server.metrics", "dlm_server"),
        ("dlm.client.metrics", "dlm_client"),
    ):
        agreed = {name: of for name, of in _AGREED.items() if name.startswith(prefix)}
        for name, labels in (_declared(module) or agreed).items():
            histogram = "le" in labels or "le" in agreed.get(name, ())
            for ending in HISTOGRAM if histogram else ("",):
                extra = ("le",) if ending == "_bucket" else ()
                families[name + ending] = (*(x for x in labels if x != "le"), *extra)
    return {name: frozenset(labels) | TARGET for name, labels in families.items()} | {
        name: labels | TARGET for name, labels in OWN.items()
    }
