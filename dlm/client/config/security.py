"""A client's settings for TLS and tokens, and the addresses of servers.

A token is sent only over TLS or to an address of this machine. A channel uses a proxy only if a
setting says so, and then only over TLS.
"""

from __future__ import annotations

import ipaddress
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from urllib.parse import unquote

from dlm.config import about, setting
from dlm.errors import ConfigError

# gRPC may read a bare "host:port" of any other form as an unintended scheme.
_HOST_PORT = (
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
MAX_PORT = 65_535
# gRPC's schemes that take a host and port, or several: "ipv4:1.2.3.4:5,1.2.3.5:5".
_LISTS = r"(?:ipv4:|ipv6:|dns:(?://[^/]*/)?)"
# Its schemes without a port.
_PORTLESS = r"(?s:(?:unix:|unix-abstract:|xds:).+)"
RESOLVE_S = 5.0  # a name that takes longer to resolve is not one of this machine


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """A client's credentials, and what it trusts. Without any field, calls are plaintext."""

    ca: str = setting(
        "",
        "PEM file of the CA that signed the servers' certificates; enables TLS.",
        metavar="FILE",
    )
    cert: str = setting("", "PEM file of this client's certificate.", metavar="FILE")
    key: str = setting(
        "",
        "PEM file of this client's private key, mode 600 (640 if root owns it).",
        metavar="FILE",
    )
    server_name: str = setting("", "Name in the servers' certificates.", metavar="NAME")
    token_file: str = setting(
        "",
        "File with this client's token, mode 600 (640 if root owns it).",
        metavar="FILE",
        why="Read again when it changes.",
    )
    token: str = field(
        default="",
        repr=False,
        metadata=about(
            "This client's token, instead of a file.",
            why="Never shown, but pickled with the client.",
        ),
    )
    insecure: bool = setting(False, "Send the token to other hosts without TLS.")
    use_proxy: bool = setting(
        False,
        "Use the proxy set in the environment; requires TLS.",
        why="grpc_proxy, https_proxy or http_proxy, except for hosts in no_grpc_proxy or no_proxy. "
        "Without this, these variables have no effect.",
    )

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
        if self.token:
            from dlm.wire.secret import TOKEN  # which the help of commands does not need

            if not TOKEN.fullmatch(self.token):
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
        """`address`, or the loopback addresses that it resolves to if a token would travel without
        TLS: the checked addresses are the ones used. Raises ConfigError if others could read the
        token in transit, or a proxy is set without TLS."""
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


def check_address(address: object) -> str:
    """`address`, if it is "host:port", "[IPv6]:port", or one of gRPC's schemes with either; else
    raises ConfigError, where gRPC would read a port above 65535 as another one, and many typos as
    names."""
    if not isinstance(address, str):
        raise _refusal(address, 'expected "host:port"')
    if re.fullmatch(_PORTLESS, address):
        return address
    text = address
    if scheme := re.match(_LISTS, address):
        text = unquote(address[scheme.end() :])
    for one in text.split(",") if scheme else (text,):
        if fault := _fault(one):
            raise _refusal(address, fault)
    return address


def _fault(text: str) -> str:
    if "://" in text:
        return 'expected "host:port", without a scheme and "//"'
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        return 'expected "host:port"' if colon else 'the port is missing; expected "host:port"'
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= MAX_PORT:
        return f"its port is {port!r}; expected a number from 1 to {MAX_PORT}"
    if not re.fullmatch(_HOST_PORT, text):
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
    """The gRPC target of the loopback addresses that `address` stands for; None if one is on
    another machine, or comes from another DNS server or a scheme such as xds."""
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
        match = re.fullmatch(_HOST_PORT, one)
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
    import socket  # which the help of commands does not need

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
