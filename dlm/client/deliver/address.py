"""Is this the address of a server?"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from urllib.parse import unquote

from dlm.errors import ConfigError

# A bare "host:port" of any other form may be read by gRPC as a scheme that nobody meant.
HOST_PORT = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
MAX_PORT = 65_535
# gRPC's own, of which each names host and port, or several of them: "ipv4:1.2.3.4:5,1.2.3.5:5".
_LISTS = re.compile(r"(?:ipv4:|ipv6:|dns:(?://[^/]*/)?)")
# Those whose rest has no port.
_PORTLESS = re.compile(r"(?:unix:|unix-abstract:|xds:).+", re.DOTALL)


def check_address(address: object) -> str:
    """`address`, where it is "host:port", "[IPv6]:port", or one of gRPC's schemes with such.

    gRPC itself takes a port above 65535 for another one, and many a typing error for a name.

    Raises
        ConfigError  what is wrong with it; the caller adds where it stands
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
    """What is wrong with "host:port"; "" where it is right."""
    if "://" in text:
        return 'expected "host:port", without a scheme and "//"'
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        return 'expected "host:port"' if colon else 'the port is missing; expected "host:port"'
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= MAX_PORT:
        return f"its port is {port!r}; a number from 1 to {MAX_PORT} is expected"
    if not HOST_PORT.fullmatch(text):
        more = '; an IPv6 address stands in brackets, as in "[::1]:50060"' if ":" in host else ""
        return f'{host!r} is not the name or address of a host; expected "host:port"{more}'
    if host.startswith("["):
        try:
            IPv6Address(host[1:-1])
        except ValueError:
            return f"{host} is not an IPv6 address"
    return ""


def _refusal(address: object, fault: str) -> ConfigError:
    return ConfigError(f"{address!r} is not a server address: {fault}")
