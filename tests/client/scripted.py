"""Connections that a test holds, breaks, changes and counts; and clients that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import Cluster
from dlm.client import Client, ClientConfig
from dlm.client.cascade import BeatReply
from dlm.client.cluster_file import ClusterFile, Endpoint, FixedEndpoints, Metadata
from dlm.client.core import Core
from dlm.client.server import GrpcConnection, Reply
from dlm.errors import DlmError
from dlm.index.layout import Manifest
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb

KIND_OF = {
    pb.DOWNLOAD_FILE_VOCABULARY: "vocabulary",
    pb.DOWNLOAD_FILE_LOW_ORDERS: "low_orders",
}

# What becomes of a reply: the bytes to hand on, or an error.
Change = Callable[[bytes], bytes | DlmError]


class Network:
    """Makes the connections of a client; `connect` is what `Core` takes.

    requests   address and decoded queries of each Score sent
    blocks     address and decoded contexts of each ContextBlock sent
    described  Describe calls so far
    change     applied to every reply, where set
    instant    given to the caller instead of sending, within the call itself, where set
    moved      address -> where what is sent to it really goes
    made       its connections
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, codec.ScoreRequest]] = []
        self.blocks: list[tuple[str, codec.BlockRequest]] = []
        self.described = 0
        self.change: Change | None = None
        self.instant: Exception | None = None
        self.moved: dict[str, str] = {}
        self.made: list[Scripted] = []
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] | None = None

    def connect(self, address: str) -> Scripted:
        """A connection to `address`."""
        self.made.append(Scripted(self, address))
        return self.made[-1]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, requests are taken but travel only at the end."""
        with self._lock:
            self._held = []
        try:
            yield
        finally:
            with self._lock:
                waiting, self._held = self._held, None
            for send in waiting or ():
                send()

    def take(self, address: str, request: bytes, send: Callable[[], None]) -> None:
        """Counts a request, and sends it now or at the end of `held`."""
        with self._lock:
            decoded = codec.decode_score_request(request, max_queries=1 << 31)
            self.requests.append((address, decoded))
            if self._held is not None:
                self._held.append(send)
                return
        send()


class Scripted:
    """A real `Connection` under the hand of a `Network`."""

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        self.network = network
        self._real: dict[str, GrpcConnection] = {}
        self._lock = threading.Lock()

    def _target(self) -> GrpcConnection:
        address = self.network.moved.get(self.address, self.address)
        with self._lock:
            if address not in self._real:
                self._real[address] = GrpcConnection(address)
            return self._real[address]

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> None:
        """See `Connection.score`."""

        def changed(data: bytes | None, error: DlmError | None) -> None:
            if data is not None and self.network.change is not None:
                new = self.network.change(data)
                data, error = (None, new) if isinstance(new, DlmError) else (new, None)
            reply(data, error)

        def send() -> None:
            try:
                self._target().score(request, timeout_s, changed, metadata)
            except DlmError as exc:  # closed while it was held
                reply(None, exc)

        if isinstance(self.network.instant, DlmError):
            reply(None, self.network.instant)
        elif self.network.instant is not None:
            raise self.network.instant
        else:
            self.network.take(self.address, request, send)

    def context_block(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> None:
        """See `Connection.context_block`."""

        def changed(data: bytes | None, error: DlmError | None) -> None:
            if data is not None and self.network.change is not None:
                new = self.network.change(data)
                data, error = (None, new) if isinstance(new, DlmError) else (new, None)
            reply(data, error)

        decoded = codec.decode_block_request(request, max_queries=1 << 31)
        self.network.blocks.append((self.address, decoded))
        self._target().context_block(request, timeout_s, changed, metadata)

    def describe(self, timeout_s: float, shard_set: bytes = b"") -> pb.DescribeReply:
        """See `Connection.describe`."""
        self.network.described += 1
        return self._target().describe(timeout_s, shard_set)

    def download(
        self, request: pb.DownloadRequest, timeout_s: float
    ) -> Generator[pb.DownloadChunk, None, None]:
        """See `Connection.download`."""
        return self._target().download(request, timeout_s)

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """See `Connection.heartbeat`."""
        return self._target().heartbeat(request, timeout_s)

    def heartbeat_later(
        self, request: pb.HeartbeatRequest, timeout_s: float, reply: BeatReply
    ) -> None:
        """See `Connection.heartbeat_later`."""
        self._target().heartbeat_later(request, timeout_s, reply)

    def close(self) -> None:
        """See `Connection.close`."""
        for connection in self._real.values():
            connection.close()


def free(client: Client) -> bool:
    """Whether no message is in flight and nothing waits."""
    return not any(any(numbers) for numbers in client._core.load().values())


def settle(client: Client) -> None:
    """Returns once the loop has taken all that was given to it before."""
    taken = threading.Event()
    client._core._delivery.tell(taken.set)
    assert taken.wait(300)


class Clients:
    """Opens clients of a cluster, of addresses or of a cluster.toml; closes them at the end.

    With `network`, every message passes through it.
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self.opened: list[Client] = []

    def __call__(
        self,
        where: Cluster | Path | Sequence[str],
        network: Network | None = None,
        **config: Any,
    ) -> Client:
        """A client with these settings; a long deadline where none is given."""
        settings = ClientConfig(**{"deadline_s": 20.0, "cache_dir": self.cache_dir, **config})
        servers = where.addresses if isinstance(where, Cluster) else where
        if network is None:
            client = Client.connect(servers, settings)
        else:
            endpoints = (
                ClusterFile(servers)
                if isinstance(servers, Path)
                else FixedEndpoints([Endpoint(address) for address in servers])
            )
            client = Client(Core(endpoints, settings, connect=network.connect))
        self.opened.append(client)
        return client

    def close(self) -> None:
        """Closes those that are open."""
        while self.opened:
            self.opened.pop().close()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileServer:
    """A `Connection` that downloads from a folder, in small chunks, and can be told to misbehave.

    offsets    kind and offset of each download begun
    breaks_at  raise `fault` once this many bytes of a file were passed
    alter      applied to each chunk
    gate       waited for before each chunk; `entered` says that a download waits
    """

    def __init__(self, directory: Path, manifest: Manifest, address: str = "files:1") -> None:
        self.address = address
        self.directory = directory
        self.manifest = manifest
        self.offsets: list[tuple[str, int]] = []
        self.breaks_at: int | None = None
        self.fault: DlmError | None = None
        self.alter: Callable[[pb.DownloadChunk], pb.DownloadChunk | None] = lambda chunk: chunk
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.streams = 0  # open now

    def download(
        self, request: pb.DownloadRequest, timeout_s: float
    ) -> Generator[pb.DownloadChunk, None, None]:
        """See `Connection.download`."""
        kind = KIND_OF[request.file]
        self.offsets.append((kind, request.offset))
        data = (self.directory / self.manifest.file(kind).name).read_bytes()
        offset = request.offset
        self.streams += 1
        try:
            while offset < len(data):
                self.entered.set()
                assert self.gate.wait(300)
                if self.breaks_at is not None and offset >= self.breaks_at:
                    if self.fault is None:
                        return
                    raise self.fault
                piece = data[offset : offset + 100]
                chunk = codec.encode_chunk(
                    piece,
                    shard_set=self.manifest.shard_set_bytes,
                    shard=request.shard,
                    offset=offset,
                    file_bytes=len(data),
                )
                altered = self.alter(chunk)
                if altered is not None:
                    yield altered
                offset += len(piece)
        finally:
            self.streams -= 1

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> None:
        """Never called here."""
        raise AssertionError

    def describe(self, timeout_s: float) -> pb.DescribeReply:
        """Never called here."""
        raise AssertionError

    def heartbeat(self, request: pb.HeartbeatRequest, timeout_s: float) -> pb.HeartbeatReply:
        """Never called here."""
        raise AssertionError

    def close(self) -> None:
        """Nothing to let go of."""
