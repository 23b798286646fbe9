"""gRPC channels to servers, and the token in the metadata of each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from dlm.client.config.credentials import Certificates, Token, certificates_of, read_token
from dlm.client.config.security import PLAIN, ClientSecurity


def open_channel(
    address: str,
    options: Sequence[tuple[str, Any]],
    security: ClientSecurity = PLAIN,
    token: Token | None = None,
    certificates: Certificates | None = None,
) -> grpc.Channel:
    """A channel to `address` with these credentials; it connects at the first call.

    Args
        token         returned by `read_token`, if several channels share it
        certificates  returned by `certificates_of`, likewise
    Raises
        ConfigError  a file is missing or unusable, or others could read the token in transit
    """
    channel = _open(grpc, address, options, security, certificates)
    token = token or read_token(security)
    return channel if token is None else _TokenChannel(channel, token)


def open_aio_channel(
    address: str,
    options: Sequence[tuple[str, Any]],
    security: ClientSecurity = PLAIN,
    certificates: Certificates | None = None,
) -> grpc.aio.Channel:
    """The same for an event loop, but without the token: calls must carry that themselves."""
    return _open(grpc.aio, address, options, security, certificates)


def _open(
    kind: Any,
    address: str,
    options: Sequence[tuple[str, Any]],
    security: ClientSecurity,
    certificates: Certificates | None,
) -> Any:
    """A gRPC channel, by the functions of the module `kind`."""
    target = security.target(address)
    options = (*options, ("grpc.enable_http_proxy", int(security.use_proxy)))
    certificates = certificates or certificates_of(security)
    if certificates is None:
        return kind.insecure_channel(target, options=options)
    if security.server_name:
        options = (*options, ("grpc.ssl_target_name_override", security.server_name))
    credentials = grpc.ssl_channel_credentials(*certificates())
    return kind.secure_channel(target, credentials, options=options)


class _TokenCall:
    """A channel's method, called with the token each time."""

    def __init__(self, method: Any, token: Token) -> None:
        self._method = method
        self._token = token

    def __call__(self, *args: Any, metadata: Any = (), **more: Any) -> Any:
        return self._method(*args, metadata=(*(metadata or ()), *self._token()), **more)

    def future(self, *args: Any, metadata: Any = (), **more: Any) -> Any:
        """As gRPC's own."""
        return self._method.future(*args, metadata=(*(metadata or ()), *self._token()), **more)

    def with_call(self, *args: Any, metadata: Any = (), **more: Any) -> Any:
        """As gRPC's own."""
        return self._method.with_call(*args, metadata=(*(metadata or ()), *self._token()), **more)


class _TokenChannel(grpc.Channel):  # type: ignore[misc]
    """A channel whose calls carry a token.

    It does not use gRPC's interceptors, which would change how a closed channel fails, or its call
    credentials, which require TLS even to this machine.
    """

    def __init__(self, channel: grpc.Channel, token: Token) -> None:
        self._channel = channel
        self._token = token

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def unary_unary(self, *args: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.unary_unary(*args, **more), self._token)

    def unary_stream(self, *args: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.unary_stream(*args, **more), self._token)

    def stream_unary(self, *args: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.stream_unary(*args, **more), self._token)

    def stream_stream(self, *args: Any, **more: Any) -> Any:
        return _TokenCall(self._channel.stream_stream(*args, **more), self._token)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> _TokenChannel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
