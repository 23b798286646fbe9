"""Asks a sharded model: low orders from the local cache, the rest in one message a shard."""

import os

# Read once, when gRPC starts: lets a process that has used a client fork (see `fork`).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

from dlm.client.api.blocks import ContextBlocks
from dlm.client.api.client import AsyncClient, Client
from dlm.client.api.config import ClientConfig
from dlm.client.api.states import Extension, Family, SentenceScore, State, States
from dlm.client.api.utterance import AsyncUtterance, Utterance

__all__ = [
    "AsyncClient",
    "AsyncUtterance",
    "Client",
    "ClientConfig",
    "ContextBlocks",
    "Extension",
    "Family",
    "SentenceScore",
    "State",
    "States",
    "Utterance",
]
