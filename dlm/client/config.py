"""Settings of the client; `dlm explain client` lists them."""

from __future__ import annotations

import ipaddress
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from urllib.parse import unquote

from dlm.config import about, check, like, setting
from dlm.errors import ConfigError
from dlm.resources import cache_folder

# -------------------------------------------------------------------------------------------------
# A client's settings for TLS and tokens, and the addresses of servers.
#
# A token is sent only over TLS or to an address of this machine. A channel uses a proxy only if a
# setting says so, and then only over TLS.


# If a bare "host:port" does not match this, gRPC may take its beginning for a scheme.
_HOST_PORT = (
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
MAX_PORT = 65_535
# gRPC's schemes that take a host and port, or several: "ipv4:1.2.3.4:5,1.2.3.5:5".
_LISTS = r"(?:ipv4:|ipv6:|dns:(?://[^/]*/)?)"
# gRPC's schemes without a port.
_PORTLESS = r"(?s:(?:unix:|unix-abstract:|xds:).+)"
RESOLVE_S = 5.0  # a name that takes longer to resolve counts as another machine's


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """A client's credentials, and what it trusts. If no field is set, calls are plaintext."""

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
        why="The file is read again when it changes.",
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
        why="The variable is grpc_proxy, https_proxy or http_proxy; it does not apply to hosts in "
        "no_grpc_proxy or no_proxy. Without this setting, these variables have no effect.",
    )

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key", "token_file"):
            # Paths become absolute: a copy in another process may have another working directory.
            if value := getattr(self, name):
                object.__setattr__(self, name, str(Path(value).absolute()))
        if bool(self.cert) != bool(self.key):
            raise ConfigError("client.cert and client.key must be given together; one is missing")
        if (self.cert or self.server_name) and not self.ca:
            raise ConfigError(
                "client.cert, key and server_name need TLS; set client.ca, the PEM file of the "
                "authority that signed the servers' certificates, to enable TLS"
            )
        if self.token and self.token_file:
            raise ConfigError("client.token and client.token_file are both given; remove one")
        if self.token:
            from dlm.wire.secret import TOKEN  # `--help` does not need it

            if not TOKEN.fullmatch(self.token):
                raise ConfigError(
                    "client.token is not a token; expected 16 to 512 characters of "
                    "A-Z a-z 0-9 . _ ~ + / -, as `dlm token NAME` prints"
                )

    def over(self, base: ClientSecurity) -> ClientSecurity:
        """Returns these settings, with missing settings filled in from `base`."""
        values = {f.name: getattr(self, f.name) or getattr(base, f.name) for f in fields(self)}
        if self.token or self.token_file:
            values |= {"token": self.token, "token_file": self.token_file}
        if self.cert or self.key:
            values |= {"cert": self.cert, "key": self.key}
        return ClientSecurity(**values)

    def target(self, address: str) -> str:
        """Returns `address` or, if a token would travel without TLS and `insecure` is not set, the
        loopback addresses that it resolves to, so that the checked addresses are used. Raises
        ConfigError if others could read that token, or if a proxy is set without TLS."""
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
                "on its way to another machine. Set client.ca (the authority of the servers' "
                "certificates), or client.insecure if nobody can listen on the network"
            )
        return local


PLAIN = ClientSecurity()


def check_address(address: object) -> str:
    """Returns `address` if it is "host:port" or "[IPv6]:port", also after ipv4:, ipv6: or dns:, or
    begins with unix:, unix-abstract: or xds:; else raises ConfigError. gRPC would take a port
    above 65535 for a different port, and many typos for host names."""
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
    """Returns the gRPC target of the loopback addresses that `address` means; None if an address
    belongs to another machine, or names a DNS server or a scheme such as xds."""
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
    """Returns the addresses to which this machine resolves `host`; none if that takes too long."""
    import socket  # `--help` does not need it

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


MAX_DEADLINE_S = 1e6


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """How often heartbeats are sent, and how their answers are judged."""

    interval_s: float = setting(
        0.5,
        "Time between heartbeats.",
        unit="seconds",
        low=0.01,
        high=60,
        why="A dead host is detected in two to three seconds; a thousand clients send a server "
        "2,000 heartbeats per second, a few percent of a core.",
    )
    timeout_s: float = setting(
        1.0,
        "Time that a heartbeat may take.",
        unit="seconds",
        low=0.01,
        high=60,
        why="A lost packet is sent again after 0.2 to 0.4 s. If the timeout is longer than the "
        "interval, a silent server gets its next heartbeat after the timeout.",
    )
    jitter: float = setting(
        0.2,
        "Share of the interval by which each interval is randomly longer or shorter.",
        low=0,
        high=0.9,
        why="So clients that started together do not send heartbeats together.",
    )
    down_after: int = setting(
        3,
        "Consecutive missed heartbeats until a server is DOWN.",
        low=1,
        high=100,
        why="One lost packet is not enough.",
    )
    up_after: int = setting(
        2,
        "Consecutive answered heartbeats until a server that was DOWN is UP.",
        low=1,
        high=100,
        why="A server that flaps at the pace of the heartbeats stays DOWN.",
    )
    slow_ratio: float = setting(
        2.0,
        "A server whose delay exceeds its baseline by this factor is slow.",
        low=1,
        high=100,
        why='The paper says "doubles".',
    )
    slow_floor_s: float = setting(
        0.02,
        "A server is slow only if its delay also exceeds the baseline by this much.",
        unit="seconds",
        low=0,
        high=10,
        why="A delay of 0.2 ms doubles whenever a core is busy, and a working client adds some "
        "10 ms; no decoder notices.",
    )
    baseline_s: float = setting(
        600.0,
        "Time in which the baseline goes two thirds of the way to the delay.",
        unit="seconds",
        low=1,
        high=86_400,
    )

    def __post_init__(self) -> None:
        check("heartbeat_config", self)


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """When to switch to the local fallback and back."""

    window_s: float = setting(
        10.0,
        "Time over which messages are counted.",
        unit="seconds",
        low=1,
        high=3600,
        why="At a thousand messages per second, 0.1 % are ten failures.",
    )
    failing: float = setting(
        0.001,
        "Share of messages that may fail without a switch.",
        low=0,
        high=1,
        why="The value is the paper's.",
    )
    min_failures: int = setting(
        5,
        "Minimum number of failures in the window for a switch.",
        low=1,
        high=1_000_000,
        why="A lost packet, or one utterance at a bad moment, is not a reason to leave the full "
        "model.",
    )
    fair_s: float = setting(
        0.05,
        "A late message counts as a failure only if it had at least this much time.",
        unit="seconds",
        low=0,
        high=3600,
        why="A shorter deadline says nothing about the network or a busy server.",
    )
    slow_s: float = setting(
        2.0,
        "Time for which a shard must be slow before a switch.",
        unit="seconds",
        low=0,
        high=3600,
        why="Several heartbeats then agree.",
    )
    probe_s: float = setting(0.5, "Time between probes.", unit="seconds", low=0.01, high=3600)
    probe_timeout_s: float = setting(
        2.0,
        "Time that a probe may take.",
        unit="seconds",
        low=0.01,
        high=3600,
        why="The default equals that of `deadline_s`.",
    )
    probes: int = setting(3, "Consecutive probes that must be answered.", low=1, high=1000)
    wait_s: float = setting(1.0, "Time until the first probe.", unit="seconds", low=0.01, high=3600)
    max_wait_s: float = setting(
        30.0,
        "Maximum of the time until the first probe, which grows with each failure; at least "
        "`wait_s`.",
        unit="seconds",
        low=0.01,
        high=3600,
    )
    stable_s: float = setting(
        60.0,
        "Time on the full model after which the time until the first probe is `wait_s` again.",
        unit="seconds",
        low=0,
        high=86_400,
    )

    def __post_init__(self) -> None:
        check("failover_config", self)
        if self.max_wait_s < self.wait_s:
            raise ConfigError(
                f"failover_config.max_wait_s is {self.max_wait_s}; it must be at least wait_s, "
                f"{self.wait_s}"
            )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of a client, each with its default; `dlm explain client` lists them. Credentials
    take precedence over cluster.toml. Without credentials, calls are plaintext."""

    deadline_s: float = setting(
        2.0,
        "Time after which a call without an answer raises.",
        unit="seconds",
        above=0,
        below=MAX_DEADLINE_S,
        why="The default suits a decoder that has buffered a second of audio; each call may give "
        "its own deadline.",
    )
    connect_s: float = setting(
        10.0,
        "Time limit for finding the servers, and for each MiB of the low orders to arrive.",
        unit="seconds",
        above=0,
        below=MAX_DEADLINE_S,
        why="The time begins again with each MiB of the low orders. A partial download is kept, "
        "and the next connect resumes it.",
    )
    window: int = setting(
        4,
        "Maximum number of messages in flight per shard.",
        low=1,
        why="A second message is sent only if the first takes longer than usual. So concurrent "
        "queries share one message, and a stall does not block every utterance.",
    )
    connections: int = setting(
        4,
        "Connections per server; the second is opened when the first is busy.",
        low=1,
        why="Connections are spread over the processes that share a port.",
    )
    hedging: bool = setting(
        True,
        "If a shard has several servers, also ask a second one when a message exceeds the p99 "
        "latency of its shard.",
        why="At most 5 % of messages in the long run.",
    )
    max_queries: int = setting(
        16384,
        "Maximum number of queries in one message; fewer if the servers accept fewer.",
        low=1,
        why="This is about 200 KiB per message; beyond it, the cost per query no longer falls.",
    )
    bigram_fallback: bool = setting(
        False,
        "If no shard answers in time, answer from the low orders alone, P(w given v), and mark it "
        "(`source`), instead of raising.",
        why="For decoders, which must continue; not for callers who need the model's own scores.",
    )
    local_fallback: Path | None = setting(
        None,
        "Folder of a shard set to open in this process. New utterances use it, with its words and "
        "ids (`Utterance.vocabulary`), while the servers fail by the rules of `failover_config` "
        "(DLM 3.4). It turns `bigram_fallback` on.",
        why="The default is the one that cluster.toml names (`dlm cluster --local-fallback`), if "
        "`bigram_fallback` is on and `heartbeats` are not off.",
    )
    heartbeats: bool | None = setting(
        None,
        "Check regularly that every server is up.",
        why="By default, heartbeats are sent with `bigram_fallback`, with `local_fallback`, or if "
        "a shard has several servers.",
    )
    heartbeat_config: HeartbeatConfig = field(
        default_factory=HeartbeatConfig,
        metadata=about("How often heartbeats are sent, and when a server counts as down or slow."),
    )
    failover_config: FailoverConfig = field(
        default_factory=FailoverConfig,
        metadata=about("When to switch to the local fallback, and back."),
    )
    cache_dir: Path = field(
        default_factory=cache_folder,
        metadata=about(
            "Folder for low orders, shared by processes.",
            why="By default $DLM_CACHE_DIR, or dlm in the user's cache folder.",
        ),
    )
    trace: bool = setting(
        False, "Record an OpenTelemetry span for each call; needs the extra `trace`."
    )
    ca: str = like(ClientSecurity, "ca")
    cert: str = like(ClientSecurity, "cert")
    key: str = like(ClientSecurity, "key")
    server_name: str = like(ClientSecurity, "server_name")
    token_file: str = like(ClientSecurity, "token_file")
    token: str = like(ClientSecurity, "token")
    insecure: bool = like(ClientSecurity, "insecure")
    use_proxy: bool = like(ClientSecurity, "use_proxy")

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_dir", Path(self.cache_dir))
        if self.local_fallback is not None:
            if not isinstance(self.local_fallback, (str, os.PathLike)):
                raise ConfigError(
                    f"client.local_fallback is {self.local_fallback!r}; expected the folder of a "
                    "shard set"
                )
            object.__setattr__(self, "local_fallback", Path(self.local_fallback).absolute())
            object.__setattr__(self, "bigram_fallback", True)
            if self.heartbeats is False:
                raise ConfigError(
                    "client.heartbeats is False, but with a local fallback, the client needs "
                    "heartbeats to know when to switch back; remove heartbeats=False"
                )
        _ = self.security  # checks the credentials
        check("client", self)

    @property
    def security(self) -> ClientSecurity:
        """The credentials; raises `ConfigError` for half of a cert/key pair, or a bad token."""
        return ClientSecurity(**{f.name: getattr(self, f.name) for f in fields(ClientSecurity)})
