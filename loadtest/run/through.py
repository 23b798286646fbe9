"""A client of a gateway for a replay: its requests travel through the gateway, by gRPC. States and
ids come from a client of the cluster behind the gateway; that client sends no queries."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from dlm.client import AsyncClient, States
from dlm.client.metrics import Stats
from dlm.errors import ConfigError
from dlm.gateway.answers import SERVICE, sealed
from dlm.gateway.calls import CALLS
from dlm.wire.status import error_from_rpc

ExtendRequest, ExtendReply, _ = CALLS["Extend"]


class GatewayClient:
    """Queries the gateway at `address` on a separate channel; see `replay.Asked`."""

    def __init__(self, client: AsyncClient, address: str, deadline_s: float) -> None:
        self._client, self._address, self._deadline_s = client, address, deadline_s
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(address, options)
        self._extend = self._channel.unary_unary(
            f"/{SERVICE}/Extend",
            request_serializer=ExtendRequest.SerializeToString,
            response_deserializer=ExtendReply.FromString,
        )
        self._stats = Stats()
        self.metrics = CollectorRegistry()

    @property
    def stats(self) -> Stats:
        """The client's counts, with one message per call."""
        return replace(self._stats)

    @property
    def cascade(self) -> Any:
        """Raises `ConfigError`: a client cannot see the gateway's own cascade."""
        raise ConfigError("a gateway's client does not support a cascade")

    def utterance(self) -> Any:
        """An utterance whose calls go through the gateway, with states of the cluster's client."""
        handle = self._client.utterance()
        return SimpleNamespace(
            model_info=handle.model_info,
            vocabulary=handle.vocabulary,
            states_after=handle.states_after,
            extend=self.extend,
            context_blocks=_no_blocks,
        )

    async def extend(self, states: States, words: Any) -> Any:
        """Sends one step of a decoder through the gateway."""
        ids = np.asarray(words)
        request = ExtendRequest(
            states=[one.tobytes() for one in sealed(states)],
            word_ids=ids.ravel().tolist(),
            own_words=ids.ndim == 2,
        )
        try:
            reply = await self._extend(request, timeout=self._deadline_s)
        except grpc.RpcError as exc:
            self._stats.failed += 1
            raise error_from_rpc(exc, where=self._address) from exc
        finally:
            self._stats.messages += 1
            self._stats.bytes_sent += request.ByteSize()
        self._stats.bytes_received += reply.ByteSize()
        count = len(reply.log10_probs)
        self._stats.queries += count
        self._stats.sent_queries += count
        source = np.array(reply.sources or [0] * count, np.uint8)
        return SimpleNamespace(source=source.reshape(len(states), -1), reply=reply)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


async def _no_blocks(states: Any) -> Any:
    raise ConfigError(
        "the trace asks for all words after a context, which a gateway does not offer; leave out "
        "--gateway, or use a trace without context blocks"
    )
