"""Connections that a test holds, breaks, changes and counts; and clients that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import WAIT_S, Cluster
from dlm.client import AsyncClient, Client, ClientConfig, loop
from dlm.client.cluster_file import ClusterFile, Endpoint, FixedEndpoints, Metadata
from dlm.client.core import Core
from dlm.client.server import Connection, Reply
from dlm.errors import DlmError
from dlm.index.layout import Manifest
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb

KIND_OF = {pb.DOWNLOAD_FILE_VOCABULARY: "vocabulary", pb.DOWNLOAD_FILE_LOW_ORDERS: "low_orders"}

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
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, codec.ScoreRequest]] = []
        self.blocks: list[tuple[str, codec.BlockRequest]] = []
        self.described = 0
        self.change: Change | None = None
        self.instant: Exception | None = None
        self.moved: dict[str, str] = {}
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] | None = None

    def connect(self, address: str) -> Scripted:
        """A connection to `address`."""
        return Scripted(self, address)

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
        self._real: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def _target(self) -> Connection:
        address = self.network.moved.get(self.address, self.address)
        with self._lock:
            if address not in self._real:
                self._real[address] = Connection(address)
            return self._real[address]

    def _changed(self, reply: Reply) -> Reply:
        """`reply`, of what the network makes of the bytes that come."""

        def changed(data: bytes | None, error: DlmError | None) -> None:
            if data is not None and self.network.change is not None:
                new = self.network.change(data)
                data, error = (None, new) if isinstance(new, DlmError) else (new, None)
            reply(data, error)

        return changed

    def score(
        self, request: bytes, timeout_s: float, reply: Reply, metadata: Metadata = ()
    ) -> None:
        """See `Connection.score`."""

        def send() -> None:
            try:
                self._target().score(request, timeout_s, self._changed(reply), metadata)
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
        decoded = codec.decode_block_request(request, max_queries=1 << 31)
        self.network.blocks.append((self.address, decoded))
        self._target().context_block(request, timeout_s, self._changed(reply), metadata)

    def describe(self, timeout_s: float, shard_set: bytes = b"") -> pb.DescribeReply:
        """See `Connection.describe`."""
        self.network.described += 1
        return self._target().describe(timeout_s, shard_set)

    def __getattr__(self, name: str) -> Any:
        """The other methods of `Connection`."""
        return getattr(self._target(), name)

    def close(self) -> None:
        """See `Connection.close`."""
        for connection in self._real.values():
            connection.close()


def load(client: Client | AsyncClient) -> dict[int, tuple[int, int]]:
    """Shard -> its messages in flight and the parts of calls that wait, as metrics show them."""
    in_flight, waiting = (
        {int(one.labels["shard"]): int(one.value) for one in metric.samples}
        for metric in client.metrics.collect()
        if metric.name in ("dlm_client_in_flight", "dlm_client_queue_depth")
    )
    return {shard: (count, waiting[shard]) for shard, count in in_flight.items()}


def free(client: Client | AsyncClient) -> bool:
    """Whether no message is in flight and nothing waits."""
    return not any(any(numbers) for numbers in load(client).values())


def settle(_: Client | None = None) -> None:
    """Returns once the loop of all clients has taken what was given to it before."""
    taken = threading.Event()
    loop.post(taken.set)
    assert taken.wait(WAIT_S)


def client_of(
    where: Path | Sequence[str], settings: ClientConfig, network: Network, **seams: Any
) -> Client:
    """A client whose messages pass through the network; `seams` are a clock and a home."""
    endpoints = (
        ClusterFile(where)
        if isinstance(where, Path)
        else FixedEndpoints([Endpoint(address) for address in where])
    )
    return Client(Core(endpoints, settings, connect=network.connect, **seams))


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
            client = client_of(servers, settings, network)
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
    """What `fetch` asks for files: it sends those of a folder, in small chunks, and can be told to
    misbehave.

    offsets    kind and offset of each download begun; `shards`, of which shard
    breaks_at  raise `fault` once this many bytes of a file were passed
    alter      applied to each chunk
    gate       waited for before each chunk; `entered` says that a download waits
    """

    def __init__(self, directory: Path, manifest: Manifest, address: str = "files:1") -> None:
        self.address = address
        self.directory = directory
        self.manifest = manifest
        self.offsets: list[tuple[str, int]] = []
        self.shards: set[int] = set()
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
        self.shards.add(request.shard)
        data = (self.directory / self.manifest.file(kind).name).read_bytes()
        offset = request.offset
        self.streams += 1
        try:
            while offset < len(data):
                self.entered.set()
                assert self.gate.wait(WAIT_S)
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
