"""Server addresses, TLS and tokens: how channels are made, and the credentials of each call.

A token is sent only over TLS or to an address of this machine. A channel uses a proxy only if a
setting says so, and then only over TLS.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import grpc

from dlm.errors import ConfigError
from dlm.logs import EventLog
from dlm.wire.certificates import Contents, read_certificates
from dlm.wire.secret import (
    AUTHORIZATION,
    SCHEME,
    TOKEN,
    parse_token_file,
    read_secret,
    signature,
)

logger = EventLog(__name__)

# gRPC may read a bare "host:port" of any other form as an unintended scheme.
HOST_PORT = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
MAX_PORT = 65_535
# gRPC's schemes that take a host and port, or several: "ipv4:1.2.3.4:5,1.2.3.5:5".
_LISTS = re.compile(r"(?:ipv4:|ipv6:|dns:(?://[^/]*/)?)")
# Its schemes without a port.
_PORTLESS = re.compile(r"(?:unix:|unix-abstract:|xds:).+", re.DOTALL)
RESOLVE_S = 5.0  # a name that takes longer to resolve is not one of this machine
Metadata = tuple[tuple[str, str], ...]
Token = Callable[[], Metadata]  # the metadata of a call, with the file's current token
Certificates = Callable[[], Contents]  # what a channel's handshakes use
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """A client's credentials, and what it trusts. Without any field, calls are plaintext.

    ca           PEM file of the authorities that sign the servers' certificates; turns TLS on
    cert, key    PEM files of the client's own certificate and its key, for servers that ask for one
    server_name  name that servers' certificates must carry instead of the address's host
    token_file   file with the client's token, readable only by its owner; read again when it
                 changes
    token        the token itself; never shown, but pickled with the client
    insecure     send the token to other machines without TLS
    use_proxy    connect through the proxy that the environment names (grpc_proxy, https_proxy or
                 http_proxy, except for hosts in no_grpc_proxy or no_proxy); needs TLS. Without it
                 these variables have no effect
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""
    token: str = field(default="", repr=False)
    insecure: bool = False
    use_proxy: bool = False

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key", "token_file"):
            # Absolute: a copy in another process may have another working directory.
            if value := getattr(self, name):
                object.__setattr__(self, name, str(Path(value).absolute()))
        if bool(self.cert) != bool(self.key):
            raise ConfigError("client.cert and client.key must be given together; one is missing")
        if (self.cert or self.server_name) and not self.ca:
            raise ConfigError(
                "client.cert, key and server_name need TLS; set client.ca, the PEM file of the "
                "authority that signed the servers' certificates, to turn it on"
            )
        if self.token and self.token_file:
            raise ConfigError("client.token and client.token_file are both given; remove one")
        if self.token and not TOKEN.fullmatch(self.token):
            raise ConfigError(
                "client.token is not a token; expected 16 to 512 characters of "
                "A-Z a-z 0-9 . _ ~ + / -, as `dlm token NAME` prints"
            )

    def over(self, base: ClientSecurity) -> ClientSecurity:
        """These settings, with gaps filled from `base`."""
        values = {f.name: getattr(self, f.name) or getattr(base, f.name) for f in fields(self)}
        if self.token or self.token_file:
            values |= {"token": self.token, "token_file": self.token_file}
        if self.cert or self.key:
            values |= {"cert": self.cert, "key": self.key}
        return ClientSecurity(**values)

    def target(self, address: str) -> str:
        """The gRPC target for `address`.

        That is `address`, unless a token would travel without TLS: then it is the loopback
        addresses that `address` resolves to, so the checked addresses are the ones used.

        Raises  ConfigError  others could read the token in transit, or a proxy is set without TLS
        """
        if self.use_proxy and not self.ca:
            raise ConfigError(
                "client.use_proxy is set without TLS, so the proxy could read everything that is "
                "sent. Set client.ca (the authority of the servers' certificates), or remove "
                "use_proxy"
            )
        if self.ca or self.insecure or not (self.token or self.token_file):
            return address
        local = _local_target(address)
        if local is None:
            raise ConfigError(
                f"{address} is not an address of this machine (a loopback address, a name that "
                "resolves to nothing else, or unix:PATH), and without TLS the token could be read "
                "on its way to another machine. Set ca (the authority of the servers' "
                "certificates), or insecure if nobody can listen on the network"
            )
        return local


PLAIN = ClientSecurity()


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


def check_address(address: object) -> str:
    """`address`, if it is "host:port", "[IPv6]:port", or one of gRPC's schemes with either.

    gRPC itself reads a port above 65535 as another port, and many typos as names.

    Raises
        ConfigError  what is wrong with it; the caller adds where it was found
    """
    if not isinstance(address, str):
        raise _refusal(address, 'expected "host:port"')
    if _PORTLESS.fullmatch(address):
        return address
    text = address
    if scheme := _LISTS.match(address):
        text = unquote(address[scheme.end() :])
    for one in text.split(",") if scheme else (text,):
        if fault := _fault(one):
            raise _refusal(address, fault)
    return address


def _fault(text: str) -> str:
    """What is wrong with "host:port"; "" if nothing is."""
    if "://" in text:
        return 'expected "host:port", without a scheme and "//"'
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        return 'expected "host:port"' if colon else 'the port is missing; expected "host:port"'
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= MAX_PORT:
        return f"its port is {port!r}; expected a number from 1 to {MAX_PORT}"
    if not HOST_PORT.fullmatch(text):
        more = '; write an IPv6 address in brackets, as in "[::1]:50060"' if ":" in host else ""
        return f'{host!r} is not the name or address of a host; expected "host:port"{more}'
    if host.startswith("["):
        try:
            IPv6Address(host[1:-1])
        except ValueError:
            return f"{host} is not an IPv6 address"
    return ""


def _refusal(address: object, fault: str) -> ConfigError:
    return ConfigError(f"{address!r} is not a server address: {fault}")


def _local_target(address: str) -> str | None:
    """The gRPC target of the loopback addresses that `address` stands for, or None.

    Also None if any address is on another machine, if another DNS server is to be asked, and for
    schemes whose addresses come from elsewhere (xds).
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return address
    # "ipv4:1.2.3.4:5,1.2.3.5:5", "ipv6:[::1]:5", "dns:///name:5", "name:5"
    text = unquote(address)
    for scheme in ("ipv4:", "ipv6:", "dns:///", "dns:"):
        if text.startswith(scheme):
            text = text.removeprefix(scheme)
            break
    found: dict[tuple[IPv4Address | IPv6Address, str], None] = {}
    for one in text.split(","):
        match = HOST_PORT.fullmatch(one)
        resolved = _resolve(match["host"].strip("[]")) if match else ()
        if match is None or not resolved or not all(map(_is_loopback, resolved)):
            return None
        found |= dict.fromkeys((ip, match["port"]) for ip in resolved)
    if all(ip.version == 4 for ip, _ in found):
        return "ipv4:" + ",".join(f"{ip}:{port}" for ip, port in found)
    # A target has addresses of one family; an IPv4 address can be written as IPv6.
    pairs = ((ip if ip.version == 6 else f"::ffff:{ip}", port) for ip, port in found)
    return "ipv6:" + ",".join(f"[{ip}]:{port}" for ip, port in pairs)


def _is_loopback(ip: IPv4Address | IPv6Address) -> bool:
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return (mapped or ip).is_loopback


def _resolve(host: str) -> tuple[IPv4Address | IPv6Address, ...]:
    """The addresses of `host` as this machine resolves it; none if it takes too long."""
    with suppress(ValueError):
        return (ipaddress.ip_address(host),)
    found: list[str] = []

    def look() -> None:
        with suppress(OSError, UnicodeError):
            found.extend(str(i[4][0]) for i in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=look, name="dlm-resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_S)  # getaddrinfo has no timeout of its own
    return tuple(dict.fromkeys(ipaddress.ip_address(one.split("%")[0]) for one in tuple(found)))


def check_files(security: ClientSecurity) -> None:
    """Reads certificates, key and token, before any server is asked.

    Raises  ConfigError  a file is missing or unusable
    """
    certificates_of(security)
    read_token(security)


def certificates_of(security: ClientSecurity) -> Certificates | None:
    """A function that returns what each channel's handshakes use; None without TLS.

    The files are read again when they change. If they are unusable by then, the old ones stay.

    Raises
        ConfigError  a file is missing or unusable
    """
    if not security.ca:
        return None
    files = {"ca": security.ca, "cert": security.cert, "key": security.key}
    paths = [Path(name) for name in files.values() if name]
    return _LastUsable("certificates", partial(read_certificates, **files), *paths)


def read_token(security: ClientSecurity) -> Token | None:
    """A function that returns the metadata with the token, for each call; None without a token.

    A token file is read again when it changes. If it is unusable by then, the old token stays.

    Raises
        ConfigError  the file is missing or unusable
    """
    if security.token:
        fixed = ((AUTHORIZATION, SCHEME + security.token),)
        return lambda: fixed
    if not security.token_file:
        return None
    path = Path(security.token_file)

    def read() -> Metadata:
        return ((AUTHORIZATION, SCHEME + parse_token_file(read_secret(path), path)),)

    return _LastUsable("token", read, path)


class _LastUsable(Generic[T]):
    """What files held when they were last usable; from any thread."""

    def __init__(self, what: str, read: Callable[[], T], *paths: Path) -> None:
        self._what, self._read, self._paths = what, read, paths
        self._seen = signature(*paths)
        self._found = read()
        self._logged = ""

    def __call__(self) -> T:
        """Their content; logs once why files that have changed are unusable."""
        now = signature(*self._paths)
        if now != self._seen:
            try:
                # Both or none: files that could not be read may be readable next time.
                self._found, self._seen, self._logged = self._read(), now, ""
            except ConfigError as exc:
                if str(exc) != self._logged:
                    self._logged = str(exc)
                    logger.error("client.%s.kept", self._what, extra={"error": self._logged})
        return self._found


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
