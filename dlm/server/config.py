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
    """Rejects a certificate or a key alone, and an address that is empty or open to strangers."""
    if config.share_port and not config.port:
        raise ConfigError(f"{section}.share_port is set, but the port is 0; give a port (--port)")
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
            f"{section}.tls_client_ca is set, but clients can present certificates only over TLS; "
            "set tls_cert and tls_key too"
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
    """The settings of a process that answers: who may call and how often, how it is monitored, and
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
        why="Give it together with `tls_key`; both files are read again when they change. If "
        "empty, TLS is off.",
        metavar="FILE",
    )
    tls_key: str = setting(
        "",
        "PEM file of the certificate's private key, mode 600 (640 if root owns it).",
        metavar="FILE",
    )
    tls_client_ca: str = setting(
        "",
        "PEM file of the CA that signs client certificates; clients must present one.",
        why="It needs `tls_cert`, and is read again when it changes.",
        metavar="FILE",
    )
    tokens: str = setting(
        "",
        "File of accepted client tokens; see dlm token.",
        why="It has one line NAME:SHA256 or NAME:TOKEN per token, and mode 600 (640 if root owns "
        "it). It is read again within a second of a change. If empty, no tokens are required.",
        metavar="FILE",
    )
    open_health: bool = setting(
        False,
        "Accept health checks without a token.",
        why="This is grpc.health.v1, for the probes of an orchestrator.",
    )
    insecure: bool = setting(
        False,
        "Accept other hosts without TLS, or without authentication.",
        why="Set it only on a network where every machine may read the model.",
    )
    share_port: bool = setting(
        False,
        "Let other processes listen on this port, too.",
        why="To use several cores, start as many processes with the same options except for their "
        "metrics ports. The system spreads connections over them. Limits apply to each "
        "process.",
    )
    max_in_flight: int
    client_streams: int = setting(
        1024,
        "Maximum number of calls and streams that one client may have open; further ones are "
        "refused with CLIENT_LIMIT.",
        low=1,
        high=65_536,
        why="A client is a token's name, else a certificate's subject, else an address. The "
        "default is enough for a host of 256 decoding processes with four streams each, and a "
        "sixteenth of `max_calls`. Each stream may hold a partly received message of "
        "`max_message_bytes`, which does not count as in flight: set fewer if clients may be "
        "hostile and memory is short.",
    )
    client_in_flight: int
    max_calls: int = setting(
        16_384,
        "Maximum number of calls and streams that all clients together may have open.",
        low=64,
        high=1 << 20,
        why="An idle call or stream takes about 15 KiB.",
    )
    drain_grace_s: float = setting(
        3.0,
        "Time after SIGTERM in which a DRAINING server still answers everything, while its clients "
        "notice and move. 0 refuses at once.",
        unit="seconds",
        low=0,
        high=3600,
        why="The time ends early if no client has a stream open, or if no client has sent a "
        "request for a second. By default, clients send a heartbeat twice a second.",
    )
    shutdown_timeout_s: float = setting(
        5.0,
        "Time after `drain_grace_s` in which accepted Score messages may finish.",
        unit="seconds",
        low=0,
        high=3600,
        why="It is far above any deadline that a client sets; together with `drain_grace_s`, it "
        "is below the 10 to 30 s after which service managers kill a process.",
    )
    metrics_port: int = setting(
        0, "Port of /metrics, /load, /healthz and /readyz; 0 disables them.", low=0, high=65_535
    )
    metrics_host: str = setting(
        "127.0.0.1",
        "Address to listen on for metrics.",
        why="Addresses beyond loopback are allowed: metrics show no text and no word ids, but "
        "anyone who can reach them sees how busy the server is.",
    )
    trace: bool = setting(
        False,
        "Make a span for each Score message whose caller sent a sampled trace context.",
        why="It needs the extra `trace`, and an OpenTelemetry SDK set up in the process "
        "(`opentelemetry-instrument dlm serve ...`).",
    )

    @property
    def address(self) -> str:
        return address_of(self.host, self.port)

    @property
    def client_downloads(self) -> int:
        """Downloads that a client may have open; 0 for a process that sends no files."""
        return 0


@dataclass(frozen=True, slots=True)
class ServerConfig(Access):
    """How a shard server listens, what it accepts, and when it gives up; checked when made."""

    port: int = setting(
        0, "Port to listen on; 0 picks a free one, which server.ready logs.", low=0, high=65_535
    )
    sets: str = setting(
        "",
        "File that lists the folders of the shard sets to serve, one per line, the default first.",
        why="The server follows the file while it runs: it loads new sets beside the others, and "
        "unloads those that are no longer listed. To replace the file, rename a new one over it. A "
        "list that cannot be served is logged (`server.sets.rejected`) and changes nothing.",
        metavar="FILE",
    )
    public_key: str = setting(
        "",
        "Refuse a shard set from a store unless this Ed25519 key signed it.",
        metavar="FILE",
    )
    max_queries: int = setting(
        65_536,
        "Maximum number of queries in one Score message.",
        low=1,
        high=1 << 22,
        why="Such a message keeps a core busy for tens of milliseconds, already longer than "
        "another client should wait; larger messages gain nothing.",
    )
    max_message_bytes: int = setting(
        4 * MIB,
        "Maximum size of a received message.",
        unit="bytes",
        low=4096,
        high=64 * MIB,
        why="4 MiB holds `max_queries` queries of order 5 that share no context (25 bytes each) "
        "twice over.",
    )
    max_in_flight: int = setting(
        256,
        "Maximum number of Score messages being worked on or waiting for a thread; further ones "
        "are refused with OVERLOADED.",
        low=1,
        high=65_536,
        why="At 64 queries each, 256 messages take a core about 30 ms; a full queue is already "
        "late for a decoder. The limit bounds the memory of whole messages (`max_in_flight` * "
        "`max_message_bytes`); `client_streams` bounds that of partly received ones.",
    )
    inline_queries: int = setting(
        2048,
        "Maximum number of queries in a message that is answered on the event loop itself; larger "
        "messages go to a thread.",
        low=0,
        high=65_536,
        why="A search for 2,048 queries takes about 0.2 ms, as long as handing a message to a "
        "thread and back on a busy machine; no other message waits longer for it.",
    )
    threads: int = setting(
        2,
        "Threads that answer the larger messages.",
        low=1,
        high=256,
        why="The kernels hold no lock, so more threads help, up to the number of cores; 2 leaves "
        "room for several servers on one machine.",
    )
    max_downloads: int = setting(
        4,
        "Maximum number of downloads running at once; further ones are refused with OVERLOADED and "
        "resume later.",
        low=1,
        high=1024,
        why="One thread compresses for all of them, so that clients that start do not slow those "
        "that score.",
    )
    client_in_flight: int = setting(
        192,
        "Maximum number of one client's Score messages being worked on; further ones are refused "
        "with CLIENT_LIMIT.",
        low=1,
        high=65_536,
        why="Three quarters of `max_in_flight`, so that no single client can fill the server.",
    )
    client_downloads: int = setting(
        3,
        "Maximum number of one client's downloads running at once; further ones are refused with "
        "CLIENT_LIMIT.",
        low=1,
        high=1024,
        why="So one of `max_downloads` is left for other clients.",
    )
    verify: bool = setting(
        True,
        "Check the checksum of every file at start.",
        why="The check reads the shard once (about 1 s per GiB from a warm page cache); without "
        "it, damage on disk can become a wrong score.",
    )
    preload: bool = setting(
        False,
        "Load every page before the server reports ready.",
        why="Then no query waits for the disk. Loading takes the time of one read; use it if the "
        "shard fits in memory. Without it, the first queries wait, page by page.",
    )
    mlock: bool = setting(
        False,
        "Lock the pages in memory; implies --preload.",
        why="It needs a locked-memory limit as large as the shard's file.",
    )
    huge_pages: bool = setting(
        False,
        "Copy the files to huge pages when they are opened.",
        why="Queries are a few per cent faster, but processes on one host no longer share their "
        "memory.",
    )

    def __post_init__(self) -> None:
        check_exposure("server", self)
        check("server", self)
