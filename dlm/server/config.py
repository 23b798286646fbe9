"""Settings of a shard server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from dlm.errors import ConfigError

MIB = 1 << 20


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _within(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"server.{name} is {value}; it must be from {low} to {high}{' ' * bool(unit)}{unit}"
        )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How one shard server listens, what it takes and when it gives up; checked at construction."""

    # Address to listen on. If other machines can reach it, clients must authenticate, by
    # certificates (tls_client_ca) or by tokens over TLS; or set insecure.
    host: str = "127.0.0.1"

    # TCP port, 0 to 65535. 0 lets the system pick; on_ready and the ready file report it.
    port: int = 0

    # PEM files: the server's certificate with its chain, and its key, readable only by its owner.
    # Both or neither; read again when they change. Empty: no TLS.
    tls_cert: str = ""
    tls_key: str = ""

    # PEM file of the authorities whose certificates clients must show (mutual TLS); needs tls_cert.
    # Read again when it changes.
    tls_client_ca: str = ""

    # File of the clients' tokens, a line NAME:SHA256 or NAME:TOKEN each; readable only by its
    # owner. Read again within a second of a change. Empty: no tokens are required.
    tokens: str = ""

    # Answer grpc.health.v1 to callers without a token, for the probes of an orchestrator.
    open_health: bool = False

    # Allow a host that other machines can reach although anyone may ask, or tokens travel in clear.
    # Set it only on a network where every machine may read the model.
    insecure: bool = False

    # Processes that share the port, 1 to 256. Suggested: one per core this server may use; each
    # answers on one core, from the same mapped files. 1 runs without a supervisor. Limits apply to
    # each process, and to each model if it serves several.
    workers: int = 1

    # Queries in one Score message, 1 to 4,194,304. 65,536: such a message takes a core for tens of
    # milliseconds, already longer than a client should wait behind; larger ones gain nothing.
    max_queries: int = 65_536

    # Bytes of one message received, 4 KiB to 64 MiB. 4 MiB holds max_queries queries of order 5
    # that share no context (25 bytes each) twice over.
    max_message_bytes: int = 4 * MIB

    # Score messages being worked on or waiting for a thread, 1 to 65,536; more are refused with
    # OVERLOADED. 256: at 64 queries per message, about what a core answers in 30 ms; a full queue
    # is already late for a decoder. Bounds the memory of whole messages only
    # (max_in_flight * max_message_bytes); client_streams bounds that of partly received ones.
    max_in_flight: int = 256

    # Queries in the largest message that is answered on the event loop itself, 0 to 65,536; larger
    # ones go to a thread. 2,048: some 0.2 ms of search, about the cost of handing a message to a
    # thread and back on a busy machine; nobody waits behind it for longer.
    inline_queries: int = 2048

    # Threads that answer the larger messages, 1 to 256. The kernel holds no lock, so up to the
    # number of cores; 2 leaves room for several servers on one machine.
    threads: int = 2

    # Downloads running at once, 1 to 1,024; more are refused with OVERLOADED and resume later. 4:
    # one thread compresses for all of them, so that starting clients do not slow scoring ones.
    max_downloads: int = 4

    # Calls and streams that one client may have open, 1 to 65,536; more are refused with
    # CLIENT_LIMIT. A client is a token's name, else a certificate's subject, else an address.
    # 1,024: a host of 256 decoding processes with four streams each; a sixteenth of max_calls. Each
    # may hold a partly received message of max_message_bytes, which does not count as in flight:
    # set fewer if clients may be hostile and memory is short.
    client_streams: int = 1024

    # Score messages of one client being worked on, 1 to 65,536; more are refused with CLIENT_LIMIT.
    # 192: three quarters of max_in_flight, so that no single client can fill the server.
    client_in_flight: int = 192

    # Downloads of one client running at once, 1 to 1,024; more are refused with CLIENT_LIMIT. 3:
    # one of max_downloads is left for others.
    client_downloads: int = 3

    # Calls and streams that all clients together may have open, 64 to 1,048,576. 16,384: idle ones
    # take about 15 KiB each.
    max_calls: int = 16_384

    # Seconds after SIGTERM, 0 to 3,600, in which a DRAINING server still answers everything, while
    # its clients notice and move. This ends as soon as no client has a stream open, or none has
    # asked for a second. 3: by default, clients send a heartbeat twice a second. 0 refuses at once.
    linger_s: float = 3.0

    # Seconds, 0 to 3,600, for Score messages accepted by then to finish. 5: far above any deadline
    # a client sets; with linger_s, below the 10 to 30 s that service managers wait before they
    # kill.
    drain_s: float = 5.0

    # TCP port of /metrics, /healthz and /readyz over HTTP, 0 to 65535; 0: none.
    metrics_port: int = 0

    # Address that port listens on. Beyond loopback is allowed: it shows no text and no word ids,
    # but anyone who reaches it sees how busy the server is.
    metrics_host: str = "127.0.0.1"

    # Make a span of each Score whose caller sent a sampled trace context. Needs the extra `trace`,
    # and an OpenTelemetry SDK set up in the process (`opentelemetry-instrument dlm serve ...`).
    trace: bool = False

    # Check the checksum of every file at start. Costs one read of the shard (about 1 s per GiB from
    # a warm page cache); without it, damage on disk can become a wrong score.
    verify: bool = True

    # Map every page before reporting ready, so that no query waits for the disk. Costs the time of
    # one read; leave on if the shard fits in memory. Without it the first queries pay, page by
    # page. Workers find the pages in memory and map them on use, a microsecond per sixteen.
    preload: bool = False

    # Lock the pages in memory (mlock); implies preload. Needs a locked-memory limit as large as the
    # shard and the low orders.
    mlock: bool = False

    # Read the files into private huge pages. A few per cent faster, but servers of one shard on one
    # host no longer share their memory; workers of one server still do.
    huge_pages: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("server.host is empty; give an address, such as 127.0.0.1")
        self._check_exposure()
        if not self.metrics_host:
            raise ConfigError("server.metrics_host is empty; give an address, such as 127.0.0.1")
        _within("port", self.port, 0, 65_535, "")
        _within("metrics_port", self.metrics_port, 0, 65_535, "")
        _within("workers", self.workers, 1, 256, "processes")
        _within("max_queries", self.max_queries, 1, 1 << 22, "queries")
        _within("max_message_bytes", self.max_message_bytes, 4096, 64 * MIB, "bytes")
        _within("max_in_flight", self.max_in_flight, 1, 65_536, "messages")
        _within("inline_queries", self.inline_queries, 0, 65_536, "queries")
        _within("threads", self.threads, 1, 256, "threads")
        _within("max_downloads", self.max_downloads, 1, 1024, "downloads")
        _within("client_streams", self.client_streams, 1, 65_536, "calls")
        _within("client_in_flight", self.client_in_flight, 1, 65_536, "messages")
        _within("client_downloads", self.client_downloads, 1, 1024, "downloads")
        _within("max_calls", self.max_calls, 64, 1 << 20, "calls")
        _within("linger_s", self.linger_s, 0.0, 3600.0, "seconds")
        _within("drain_s", self.drain_s, 0.0, 3600.0, "seconds")

    def _check_exposure(self) -> None:
        """Rejects half of a pair, and an address where strangers could connect or listen."""
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(
                f"server.{missing} is missing; TLS needs tls_cert and tls_key (--tls-cert FILE "
                "--tls-key FILE)"
            )
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError(
                "server.tls_client_ca requires certificates from clients, which needs TLS; set "
                "tls_cert and tls_key too"
            )
        if self.insecure or is_loopback(self.host) or self.tls_client_ca:
            return
        if self.tokens and not self.tls_cert:
            raise ConfigError(
                f"server.host is {self.host!r}, which other machines may reach, and without TLS "
                "others can read the tokens in transit. Use --tls-cert and --tls-key, or "
                "--insecure if nobody can listen on the network"
            )
        if not self.tokens:
            raise ConfigError(
                f"server.host is {self.host!r}, which other machines may reach, but clients need "
                "not authenticate. Use 127.0.0.1; or TLS (--tls-cert, --tls-key) with "
                "--tls-client-ca or --tokens; or --insecure on a network where every machine may "
                "read the model"
            )

    @property
    def address(self) -> str:
        """host:port as gRPC writes it, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
