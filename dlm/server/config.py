"""Settings of a shard server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from dlm.config import check, setting
from dlm.errors import ConfigError

MIB = 1 << 20


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(section: str, config: Access) -> None:
    """Rejects half of a pair, an empty address, and one where strangers could connect or listen."""
    if config.share_port and not config.port:
        raise ConfigError(f"{section}.share_port needs a port that is not 0; give one (--port)")
    for name in ("host", "metrics_host"):
        if not getattr(config, name):
            raise ConfigError(f"{section}.{name} is empty; give an address, such as 127.0.0.1")
    if bool(config.tls_cert) != bool(config.tls_key):
        missing = "tls_key" if config.tls_cert else "tls_cert"
        raise ConfigError(
            f"{section}.{missing} is missing; TLS needs tls_cert and tls_key (--tls-cert FILE "
            "--tls-key FILE)"
        )
    if config.tls_client_ca and not config.tls_cert:
        raise ConfigError(
            f"{section}.tls_client_ca requires certificates from clients, which needs TLS; set "
            "tls_cert and tls_key too"
        )
    if config.insecure or is_loopback(config.host) or config.tls_client_ca:
        return
    if config.tokens and not config.tls_cert:
        raise ConfigError(
            f"{section}.host is {config.host!r}, which other machines may reach, and without TLS "
            "others can read the tokens in transit. Use --tls-cert and --tls-key, or "
            "--insecure if nobody can listen on the network"
        )
    if not config.tokens:
        raise ConfigError(
            f"{section}.host is {config.host!r}, which other machines may reach, but clients need "
            "not authenticate. Use 127.0.0.1; or TLS (--tls-cert, --tls-key) with "
            "--tls-client-ca or --tokens; or --insecure on a network where every machine may "
            "read the model"
        )


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The settings of a process that answers: who may call and how much, how it shows itself, and
    how it ends."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on.",
        why="If other machines can reach it, clients must authenticate, by certificates "
        "(`tls_client_ca`) or by tokens over TLS; or set `insecure`.",
    )
    port: int
    tls_cert: str = setting(
        "",
        "PEM file of the server's certificate chain.",
        why="With `tls_key`, or neither; both are read again when they change. Empty: no TLS.",
        metavar="FILE",
    )
    tls_key: str = setting(
        "", "PEM file of its private key, mode 600 (640 if root owns it).", metavar="FILE"
    )
    tls_client_ca: str = setting(
        "",
        "PEM file of the CA that signs client certificates; clients must present one.",
        why="Needs `tls_cert`. Read again when it changes.",
        metavar="FILE",
    )
    tokens: str = setting(
        "",
        "File of accepted client tokens; see dlm token.",
        why="A line NAME:SHA256 or NAME:TOKEN each; mode 600 (640 if root owns it). Read again "
        "within a second of a change. Empty: no tokens are required.",
        metavar="FILE",
    )
    open_health: bool = setting(
        False,
        "Accept health checks without a token.",
        why="grpc.health.v1, for the probes of an orchestrator.",
    )
    insecure: bool = setting(
        False,
        "Accept other hosts without TLS, or without authentication.",
        why="Set it only on a network where every machine may read the model.",
    )
    share_port: bool = setting(
        False,
        "Let other processes listen on this port, too.",
        why="For more cores than one: start as many processes, alike but for their metrics ports. "
        "The system spreads connections over them. Limits apply to each process.",
    )
    max_in_flight: int
    client_streams: int = setting(
        1024,
        "Calls and streams that one client may have open; more are refused with CLIENT_LIMIT.",
        low=1,
        high=65_536,
        why="A client is a token's name, else a certificate's subject, else an address. A host of "
        "256 decoding processes with four streams each; a sixteenth of `max_calls`. Each may hold "
        "a partly received message of `max_message_bytes`, which does not count as in flight: set "
        "fewer if clients may be hostile and memory is short.",
    )
    client_in_flight: int
    max_calls: int = setting(
        16_384,
        "Calls and streams that all clients together may have open.",
        low=64,
        high=1 << 20,
        why="Idle ones take about 15 KiB each.",
    )
    drain_grace_s: float = setting(
        3.0,
        "Time after SIGTERM in which a DRAINING server still answers everything, while its clients "
        "notice and move. 0 refuses at once.",
        unit="seconds",
        low=0,
        high=3600,
        why="It ends as soon as no client has a stream open, or none has asked for a second. By "
        "default, clients send a heartbeat twice a second.",
    )
    shutdown_timeout_s: float = setting(
        5.0,
        "Time for Score messages accepted by then to finish.",
        unit="seconds",
        low=0,
        high=3600,
        why="Far above any deadline a client sets; with `drain_grace_s`, below the 10 to 30 s that "
        "service managers wait before they kill.",
    )
    metrics_port: int = setting(
        0, "Port of /metrics, /load, /healthz and /readyz; 0 disables them.", low=0, high=65_535
    )
    metrics_host: str = setting(
        "127.0.0.1",
        "Address to listen on for metrics.",
        why="Beyond loopback is allowed: it shows no text and no word ids, but anyone who reaches "
        "it sees how busy the server is.",
    )
    trace: bool = setting(
        False,
        "Make a span of each Score whose caller sent a sampled trace context.",
        why="Needs the extra `trace`, and an OpenTelemetry SDK set up in the process "
        "(`opentelemetry-instrument dlm serve ...`).",
    )

    @property
    def address(self) -> str:
        return address_of(self.host, self.port)

    @property
    def client_downloads(self) -> int:
        """None, for what hands out no files."""
        return 0


@dataclass(frozen=True, slots=True)
class ServerConfig(Access):
    """How one shard server listens, what it takes and when it gives up; checked at construction."""

    port: int = setting(
        0, "Port to listen on; 0 picks a free one, which server.ready logs.", low=0, high=65_535
    )
    sets: str = setting(
        "",
        "File that lists the folders of the shard sets to serve, one per line, the default first.",
        why="Followed while the server runs: it loads new sets beside the others, and unloads "
        "those that are no longer listed. Replace it by renaming a new file over it. A list that "
        "cannot be served is logged (`server.sets.rejected`) and changes nothing.",
        metavar="FILE",
    )
    max_queries: int = setting(
        65_536,
        "Queries in one Score message.",
        low=1,
        high=1 << 22,
        why="Such a message takes a core for tens of milliseconds, already longer than a client "
        "should wait behind; larger ones gain nothing.",
    )
    max_message_bytes: int = setting(
        4 * MIB,
        "Size of one message received.",
        unit="bytes",
        low=4096,
        high=64 * MIB,
        why="4 MiB holds `max_queries` queries of order 5 that share no context (25 bytes each) "
        "twice over.",
    )
    max_in_flight: int = setting(
        256,
        "Score messages being worked on or waiting for a thread; more are refused with OVERLOADED.",
        low=1,
        high=65_536,
        why="At 64 queries per message, about what a core answers in 30 ms; a full queue is "
        "already late for a decoder. Bounds the memory of whole messages only (`max_in_flight` * "
        "`max_message_bytes`); `client_streams` bounds that of partly received ones.",
    )
    inline_queries: int = setting(
        2048,
        "Queries in the largest message that is answered on the event loop itself; larger ones go "
        "to a thread.",
        low=0,
        high=65_536,
        why="Some 0.2 ms of search, about the cost of handing a message to a thread and back on a "
        "busy machine; nobody waits behind it for longer.",
    )
    threads: int = setting(
        2,
        "Threads that answer the larger messages.",
        low=1,
        high=256,
        why="The kernel holds no lock, so up to the number of cores; 2 leaves room for several "
        "servers on one machine.",
    )
    max_downloads: int = setting(
        4,
        "Downloads running at once; more are refused with OVERLOADED and resume later.",
        low=1,
        high=1024,
        why="One thread compresses for all of them, so that starting clients do not slow scoring "
        "ones.",
    )
    client_in_flight: int = setting(
        192,
        "Score messages of one client being worked on; more are refused with CLIENT_LIMIT.",
        low=1,
        high=65_536,
        why="Three quarters of `max_in_flight`, so that no single client can fill the server.",
    )
    client_downloads: int = setting(
        3,
        "Downloads of one client running at once; more are refused with CLIENT_LIMIT.",
        low=1,
        high=1024,
        why="One of `max_downloads` is left for others.",
    )
    verify: bool = setting(
        True,
        "Check the checksum of every file at start.",
        why="Costs one read of the shard (about 1 s per GiB from a warm page cache); without it, "
        "damage on disk can become a wrong score.",
    )
    preload: bool = setting(
        False,
        "Load every page before the server reports ready.",
        why="No query waits for the disk then. Costs the time of one read; use it if the shard "
        "fits in memory. Without it the first queries pay, page by page.",
    )
    mlock: bool = setting(
        False,
        "Lock the pages in memory; implies --preload.",
        why="Needs a locked-memory limit as large as the shard's file.",
    )
    huge_pages: bool = setting(
        False,
        "Copy the files to huge pages first.",
        why="A few per cent faster, but processes on one host no longer share their memory.",
    )

    def __post_init__(self) -> None:
        check_exposure("server", self)
        check("server", self)
