"""Queries a sharded model: the local cache answers low orders, and one message per shard answers
the rest. Names are imported on first use, so importing `dlm.client.config` does not load gRPC."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# This variable lets a process fork after using a client (see `loop`); gRPC reads it when it starts.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

if TYPE_CHECKING:
    from dlm.client.client import AsyncClient, Client
    from dlm.client.config import ClientConfig
    from dlm.client.mixture import AsyncMixture, Mixture
    from dlm.client.phrases import Phrases
    from dlm.client.states import Extension, ModelInfo, SentenceScore, State, States
    from dlm.client.utterance import AsyncUtterance, ContextBlocks, Utterance

__all__ = [
    "AsyncClient",
    "AsyncMixture",
    "AsyncUtterance",
    "Client",
    "ClientConfig",
    "ContextBlocks",
    "Extension",
    "Mixture",
    "ModelInfo",
    "Phrases",
    "SentenceScore",
    "State",
    "States",
    "Utterance",
]

_LIES_IN = {
    "AsyncClient": "client",
    "AsyncMixture": "mixture",
    "AsyncUtterance": "utterance",
    "Client": "client",
    "ClientConfig": "config",
    "ContextBlocks": "utterance",
    "Extension": "states",
    "Mixture": "mixture",
    "ModelInfo": "states",
    "Phrases": "phrases",
    "SentenceScore": "states",
    "State": "states",
    "States": "states",
    "Utterance": "utterance",
}


def __getattr__(name: str) -> Any:
    if name not in _LIES_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_LIES_IN[name]}"), name)
    globals()[name] = found  # so the next lookup does not call this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
