"""How a client shows who it is, and makes sure of whom it talks to: TLS and tokens.

A token goes into the metadata of each call, here and nowhere else: over TLS, or to this machine.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import grpc

from dlm.config import nearest
from dlm.errors import ConfigError
from dlm.wire.secret import (
    AUTHORIZATION,
    SCHEME,
    TOKEN,
    Signature,
    parse_token_file,
    read_secret,
    signature,
)

logger = logging.getLogger(__name__)

TLS_KEYS = ("ca", "cert", "key", "server_name")  # of the table [tls] of a cluster.toml
Metadata = tuple[tuple[str, str], ...]
Token = Callable[[], Metadata]  # what a call must carry, as the file of the token has it now


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """What a client shows and trusts; no field stands for plaintext without a token.

    ca           PEM file of the authorities that servers' certificates are signed by; turns TLS on
    cert, key    PEM files of the client's own certificate and its key, for servers that ask for one
    server_name  name that servers' certificates must carry instead of the address's host
    token_file   file with the client's token, which its owner alone may read; read again when it
                 changes
    token        the token itself; never shown, but pickled with the client
    insecure     send the token to other machines without TLS
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""
    token: str = field(default="", repr=False)
    insecure: bool = False

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key", "token_file"):
            # Absolute: a copy in another process may stand in another folder.
            if value := getattr(self, name):
                object.__setattr__(self, name, str(Path(value).absolute()))
        if bool(self.cert) != bool(self.key):
            raise ConfigError("client.cert and client.key belong together; one is missing")
        if (self.cert or self.server_name) and not self.ca:
            raise ConfigError(
                "client.cert, key and server_name need TLS, and client.ca turns it on: give the "
                "PEM file of the authority that signed the servers' certificates"
            )
        if self.token and self.token_file:
            raise ConfigError("client.token and client.token_file were both given; one is enough")
        if self.token and not TOKEN.fullmatch(self.token):
            raise ConfigError(
                "client.token is no token: 16 to 512 characters of A-Z a-z 0-9 . _ ~ + / - are "
                "expected, such as `dlm token NAME` prints"
            )

    def over(self, base: ClientSecurity) -> ClientSecurity:
        """These settings, and those of `base` where there is none here."""
        values = {f.name: getattr(self, f.name) or getattr(base, f.name) for f in fields(self)}
        if self.token or self.token_file:
            values |= {"token": self.token, "token_file": self.token_file}
        if self.cert or self.key:
            values |= {"cert": self.cert, "key": self.key}
        return ClientSecurity(**values)

    def check(self, address: str) -> None:
        """Refuses to send a token where others may read it.

        Raises  ConfigError
        """
        if (self.token or self.token_file) and not (self.ca or self.insecure or _is_local(address)):
            raise ConfigError(
                f"{address} is another machine, and without TLS the token could be read on the "
                "way. Give ca (the authority of the servers' certificates), or insecure on a "
                "network where nobody listens"
            )


PLAIN = ClientSecurity()


def open_channel(
    address: str,
    options: Sequence[tuple[str, Any]],
    security: ClientSecurity = PLAIN,
    token: Token | None = None,
) -> grpc.Channel:
    """A channel to `address` that does what `security` says; it connects at the first call.

    Args
        token  what `read_token` gave for it, where several channels are to share that
    Raises
        ConfigError  a file is missing or no good, or the token would travel readable
    """
    channel = _open(grpc, address, options, security)
    token = token or read_token(security)
    return channel if token is None else _TokenChannel(channel, token)


def open_aio_channel(
    address: str, options: Sequence[tuple[str, Any]], security: ClientSecurity = PLAIN
) -> grpc.aio.Channel:
    """The same for an event loop, but for the token: a call must carry that by itself."""
    return _open(grpc.aio, address, options, security)


def _open(
    kind: Any, address: str, options: Sequence[tuple[str, Any]], security: ClientSecurity
) -> Any:
    """A channel of gRPC's, by the functions of its module `kind`."""
    security.check(address)
    if not security.ca:
        return kind.insecure_channel(address, options=options)
    if security.server_name:
        options = (*options, ("grpc.ssl_target_name_override", security.server_name))
    return kind.secure_channel(address, _credentials(security), options=options)


def read_cluster_security(path: str | os.PathLike[str]) -> ClientSecurity:
    """What a cluster.toml says of its servers: the table [tls], and token_file.

    Paths in it are relative to its folder. It holds no token itself, since it is no secret.

    Raises
        ConfigError  a setting it cannot have, or one that is no string
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read as TOML: {exc}") from exc
    table = content.get("tls", {})
    values = {**table} if isinstance(table, dict) else {"tls": table}
    if "token_file" in content:
        values["token_file"] = content["token_file"]
    if "token" in content or "token" in values:
        raise ConfigError(
            f"{path} holds a token, and files like it are read by many; put it in a file that its "
            "owner alone may read, and name that: token_file"
        )
    for name, value in values.items():
        if name not in (*TLS_KEYS, "token_file"):
            advice = nearest(name, TLS_KEYS) or f"; there are {', '.join(TLS_KEYS)}"
            raise ConfigError(f"{path}: [tls] has no setting named {name}{advice}")
        if not isinstance(value, str):
            raise ConfigError(f"{path}: {name} must be a string, found {value!r}")
        if value and name != "server_name":
            values[name] = str(path.absolute().parent / value)
    try:
        return ClientSecurity(**values)
    except ConfigError as exc:
        exc.add_note(f"in {path}")
        raise


def _is_local(address: str) -> bool:
    """Whether what is sent to a gRPC target stays on this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    # "ipv4:1.2.3.4:5", "dns:///name:5", "name:5", "[::1]:5"; a list is local if all of it is.
    for one in address.removeprefix("ipv4:").removeprefix("ipv6:").split(","):
        host = one.rpartition("/")[2].rpartition(":")[0].strip("[]").replace("%5B", "")
        host = host.replace("%5D", "")
        if host == "localhost":
            continue
        try:
            if not ipaddress.ip_address(host).is_loopback:
                return False
        except ValueError:
            return False
    return True


def _credentials(security: ClientSecurity) -> grpc.ChannelCredentials:
    ca = _read(security.ca)
    if b"-----BEGIN CERTIFICATE-----" not in ca:
        raise ConfigError(f"{security.ca} holds no certificate in PEM")
    cert = _read(security.cert) if security.cert else None
    key = read_secret(Path(security.key)) if security.key else None
    return grpc.ssl_channel_credentials(ca, key, cert)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


def read_token(security: ClientSecurity) -> Token | None:
    """What adds the token to a call; None where there is none.

    Kept, and asked at each call: once its file was good, one that is no good changes nothing.

    Raises
        ConfigError  the file is missing or no good
    """
    if security.token:
        fixed = ((AUTHORIZATION, SCHEME + security.token),)
        return lambda: fixed
    return _TokenFile(Path(security.token_file)).metadata if security.token_file else None


class _TokenFile:
    """The token in a file, as it stands there now; from any thread.

    Raises  ConfigError, when it is made and the file is no good
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Signature = signature(path)
        self._found = self._read()

    def metadata(self) -> Metadata:
        """The metadata of a call. A file that has become bad is logged, and the old token stays."""
        now = signature(self._path)
        if now != self._seen:
            self._seen = now
            try:
                self._found = self._read()
            except ConfigError as exc:
                logger.error("client.token.kept", extra={"error": str(exc)})
        return self._found

    def _read(self) -> Metadata:
        token = parse_token_file(read_secret(self._path), self._path)
        return ((AUTHORIZATION, SCHEME + token),)


class _TokenCall:
    """A method of a channel, called with a token each time."""

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

    Not gRPC's interceptors: they would change how a closed channel fails, and its call credentials
    want TLS even to this machine.
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
