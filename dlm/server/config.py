"""Settings of a shard server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from dlm.errors import ConfigError

MIB = 1 << 20


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _within(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"server.{name} is {value}; it must lie in {low} to {high}{' ' * bool(unit)}{unit}"
        )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How one shard server listens, what it takes and when it gives up; checked at construction."""

    # Address to listen on. One that other machines reach needs clients that say who they are: by
    # certificates (tls_client_ca), or by tokens over TLS; or insecure.
    host: str = "127.0.0.1"

    # TCP port, 0 to 65535. 0 lets the system pick; on_ready and the ready file tell which.
    port: int = 0

    # PEM files: the server's certificate with its chain, and its key, which its owner alone may
    # read. Both or none; read again when they change. Empty: no TLS.
    tls_cert: str = ""
    tls_key: str = ""

    # PEM file of the authorities whose certificates clients must show (mutual TLS); needs tls_cert.
    # Read again when it changes.
    tls_client_ca: str = ""

    # File of the tokens that let clients in, a line NAME:SHA256 or NAME:TOKEN each; its owner alone
    # may read it. Read again within a second of a change. Empty: tokens are not asked for.
    tokens: str = ""

    # Answer grpc.health.v1 to callers without a token, for the probes of an orchestrator.
    open_health: bool = False

    # Take a host that other machines can reach though anybody may ask, or tokens travel readable.
    # Set it only on a network where every machine may read the model.
    insecure: bool = False

    # Processes that share the port, 1 to 256. As many as cores this server may use: each answers on
    # one, from the same mapped files. 1 runs without a supervisor. Limits hold for each process,
    # and where it serves several models, for each of them.
    workers: int = 1

    # Queries in one Score message, 1 to 4,194,304. 65,536: one such message keeps a core for tens
    # of milliseconds, which is already more than a client should wait behind; larger gains nothing.
    max_queries: int = 65_536

    # Bytes of one message received, 4 KiB to 64 MiB. 4 MiB holds max_queries queries of order 5
    # that share no context (25 bytes each) twice over.
    max_message_bytes: int = 4 * MIB

    # Score messages being worked on or waiting for a thread, 1 to 65,536; more are refused with
    # OVERLOADED. 256: at 64 queries a message about what a core answers in 30 ms, so a queue that
    # is full is already late for a decoder. Bounds the memory of whole messages alone
    # (max_in_flight * max_message_bytes); what has come of others is bounded by client_streams.
    max_in_flight: int = 256

    # Queries in the largest message that is answered on the event loop itself, 0 to 65,536; larger
    # go to a thread. 2,048: some 0.2 ms of search, about what handing a message to a thread and
    # back costs on a busy machine, and nobody waits behind it for longer.
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
    # may hold a message of max_message_bytes that has not come to its end, which counts as nothing
    # in flight: fewer, where clients may be hostile and memory is short.
    client_streams: int = 1024

    # Score messages of one client being worked on, 1 to 65,536; more are refused with CLIENT_LIMIT.
    # 192: three quarters of max_in_flight, so that one client alone cannot fill the server.
    client_in_flight: int = 192

    # Downloads of one client running at once, 1 to 1,024; more are refused with CLIENT_LIMIT. 3:
    # one of max_downloads is left for others.
    client_downloads: int = 3

    # Calls and streams that all clients together may have open, 64 to 1,048,576. 16,384: idle ones
    # take about 15 KiB each.
    max_calls: int = 16_384

    # Seconds after SIGTERM, 0 to 3,600, in which a server that says DRAINING still answers all that
    # comes, while its clients learn of it and move. It ends as soon as no client has a stream open,
    # or none has asked for a second. 3: clients send a heartbeat twice a second unless told
    # otherwise. 0 refuses at once.
    linger_s: float = 3.0

    # Seconds, 0 to 3,600, that Score messages taken by then have to finish. 5: far above any
    # deadline a client sets; with linger_s below the 10 to 30 s that service managers wait before
    # they kill.
    drain_s: float = 5.0

    # TCP port of /metrics, /healthz and /readyz over HTTP, 0 to 65535; 0: none.
    metrics_port: int = 0

    # Address that port listens on. Beyond loopback is allowed: what it shows holds no text and no
    # id of a word, but whoever reaches it sees how busy the server is.
    metrics_host: str = "127.0.0.1"

    # Make a span of each Score whose caller sent a sampled trace context. Needs the extra `trace`,
    # and an OpenTelemetry SDK set up in the process (`opentelemetry-instrument dlm serve ...`).
    trace: bool = False

    # Compare the checksum of every file at start. Costs one read of the shard (about 1 s a GiB from
    # a warm page cache); without it, damage on disk can become a wrong score.
    verify: bool = True

    # Map every page before reporting ready, so that no query waits for the disk. Costs the time of
    # one read; on where the shard fits in memory. Without it the first queries pay, page by page.
    # Workers find the pages in memory, and map them as they touch them, a microsecond for sixteen.
    preload: bool = False

    # Keep the pages in memory whatever else the machine does (mlock); implies preload. Needs a
    # limit of locked memory as large as the shard and the low orders.
    mlock: bool = False

    # Read the files into huge pages of the process's own. A few per cent faster; but servers of one
    # shard on one host no longer share their memory; workers of one server do.
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
        """Refuses half of a pair, and an address where strangers would be let in or listen."""
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(
                f"server.{missing} is not given; TLS needs tls_cert and tls_key (--tls-cert FILE "
                "--tls-key FILE)"
            )
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError(
                "server.tls_client_ca asks for the certificates of clients, which needs TLS: give "
                "tls_cert and tls_key too"
            )
        if self.insecure or is_loopback(self.host) or self.tls_client_ca:
            return
        if self.tokens and not self.tls_cert:
            raise ConfigError(
                f"server.host is {self.host!r}, which other machines may reach, and tokens without "
                "TLS can be read on the way. Give --tls-cert and --tls-key, or --insecure on a "
                "network where nobody listens"
            )
        if not self.tokens:
            raise ConfigError(
                f"server.host is {self.host!r}, which other machines may reach, and nothing says "
                "who may ask. Use 127.0.0.1; or TLS (--tls-cert, --tls-key) with --tls-client-ca "
                "or --tokens; or --insecure on a network where every machine may read the model"
            )

    @property
    def address(self) -> str:
        """host:port as gRPC writes it, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
