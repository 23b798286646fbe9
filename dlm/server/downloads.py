"""Download: the files that clients need, chunk by chunk, from any offset."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dlm.index.layout import FileEntry
from dlm.server.admission import ShardAdmission
from dlm.server.answers import OpenShard
from dlm.server.config import ServerConfig
from dlm.server.metrics import ServerMetrics
from dlm.server.refusals import Refusal, parse
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason

KIND_OF_FILE: dict[int, str] = {
    pb.DOWNLOAD_FILE_VOCABULARY: "vocabulary",
    pb.DOWNLOAD_FILE_LOW_ORDERS: "low_orders",
}


def open_files(shard: OpenShard) -> dict[int, int]:
    """Descriptors, by number on the wire: replacing the folder of a running server has no
    effect."""
    return {
        number: os.open(shard.directory / shard.manifest.file(kind).name, os.O_RDONLY)
        for number, kind in KIND_OF_FILE.items()
    }


@dataclass(slots=True)
class Download:
    descriptor: int
    entry: FileEntry
    offset: int


class Downloads:
    """Those of one service; `files` from `open_files`, if it must not open them again."""

    def __init__(
        self,
        shard: OpenShard,
        config: ServerConfig,
        admission: ShardAdmission,
        metrics: ServerMetrics,
        files: Mapping[int, int] | None = None,
    ) -> None:
        self._shard, self._config = shard, config
        self._admission, self._metrics = admission, metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlm-download")
        opened = open_files(shard) if files is None else {n: os.dup(f) for n, f in files.items()}
        self.files: dict[int, tuple[int, FileEntry]] = {
            number: (descriptor, shard.manifest.file(KIND_OF_FILE[number]))
            for number, descriptor in opened.items()
        }

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for descriptor, _ in self.files.values():
            os.close(descriptor)
        self.files = {}

    def begin(self, data: bytes) -> Download:
        request = parse(pb.DownloadRequest(), data)
        self._admission.require_ready()
        self._admission.require_same(request.shard_set, request.shard)
        if request.file not in self.files:
            raise Refusal(
                Reason.MALFORMED,
                f"the request names file {request.file}; expected "
                f"{pb.DOWNLOAD_FILE_VOCABULARY} for the vocabulary or "
                f"{pb.DOWNLOAD_FILE_LOW_ORDERS} for the low orders",
            )
        descriptor, entry = self.files[request.file]
        if request.offset > entry.bytes:
            raise Refusal(
                Reason.OFFSET_OUT_OF_RANGE,
                f"offset {request.offset} is beyond the end of {entry.name}, which has "
                f"{entry.bytes} bytes; start again at 0",
            )
        if self._metrics.downloads >= self._config.max_downloads:
            raise Refusal(
                Reason.OVERLOADED,
                f"{self._metrics.downloads} downloads are running, which is the limit. Ask a "
                "replica, or retry later, from the same offset",
            )
        return Download(descriptor, entry, request.offset)

    def next_chunk(self, download: Download) -> Awaitable[bytes]:
        """The next chunk, serialized; raises `Refusal` if the server drains."""
        self._admission.require_ready()
        size = min(codec.CHUNK_BYTES, download.entry.bytes - download.offset)
        offset, download.offset = download.offset, download.offset + size
        loop = asyncio.get_running_loop()
        # By name at each call: a test holds the reading up.
        read: Callable[..., bytes] = self.read_chunk
        return loop.run_in_executor(
            self._thread, read, download.descriptor, download.entry, offset, size
        )

    def read_chunk(self, descriptor: int, entry: FileEntry, offset: int, size: int) -> bytes:
        raw = os.pread(descriptor, size, offset)
        if len(raw) != size:
            raise OSError(f"{entry.name} ends at byte {offset + len(raw)}; it was truncated")
        chunk = codec.encode_chunk(
            raw,
            shard_set=self._shard.manifest.shard_set_bytes,
            shard=self._shard.index,
            offset=offset,
            file_bytes=entry.bytes,
        )
        return bytes(chunk.SerializeToString())
