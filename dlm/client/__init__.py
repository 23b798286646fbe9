"""Asks a sharded model: low orders from the local cache, the rest in one message a shard."""

from dlm.client.client import AsyncClient, Client
from dlm.client.config import ClientConfig
from dlm.client.utterance import (
    AsyncUtterance,
    Extension,
    Family,
    SentenceScore,
    State,
    States,
    Utterance,
)

__all__ = [
    "AsyncClient",
    "AsyncUtterance",
    "Client",
    "ClientConfig",
    "Extension",
    "Family",
    "SentenceScore",
    "State",
    "States",
    "Utterance",
]
