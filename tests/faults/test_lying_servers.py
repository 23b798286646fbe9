"""Servers that keep to the protocol and lie: clients end in time, keep nothing, raise typed errors.

The attacker is a gRPC server of its own, since no server of dlm can be made to say these things.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
import xxhash

from client.questions import ask, queries_to
from client.scripted import KIND_OF
from cluster import Cluster, ModelFiles, build
from dlm.client import Client, ClientConfig
from dlm.errors import ConfigError, DlmError, ProtocolError, UnavailableError
from dlm.index import layout
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason
from models import random_model

CONNECT_S = 3.0
# A client that goes on while it is lied to would do so for minutes or for ever.
HANGS_S = 120.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model in one shard."""
    model = random_model(61, order=4, words=40, per_order=300)
    return build(model, tmp_path_factory.mktemp("model"), 1)


class Liar:
    """A shard server on loopback that says what a test wants.

    describe  request -> reply; the checksum is put on it
    download  request -> chunks
    score     ScoreRequest -> reply, in Exchange
    """

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.manifest = files.manifest
        self.describe: Callable[[pb.DescribeRequest], pb.DescribeReply] = self.honest
        self.download: Callable[[pb.DownloadRequest], Iterator[pb.DownloadChunk]] = self.chunks
        self.score: Callable[[codec.ScoreRequest], bytes] = lambda request: b""
        self.ended = threading.Event()  # so that no handler outlives its test
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        handlers = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe, pb.DescribeRequest.FromString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(
                lambda request, _: self.download(request),
                pb.DownloadRequest.FromString,
                pb.DownloadChunk.SerializeToString,
            ),
            "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("dlm.v1.Shard", handlers),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _describe(self, request: pb.DescribeRequest, _: Any) -> bytes:
        reply = self.describe(request)
        reply.checksum = codec.describe_checksum(reply)
        return reply.SerializeToString()

    def _exchange(self, requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for data in requests:
            yield self.score(codec.decode_score_request(data, max_queries=1 << 20))

    def honest(self, _: pb.DescribeRequest) -> pb.DescribeReply:
        """The description of its manifest."""
        return pb.DescribeReply(
            manifest=self.manifest.text,
            shard_set=self.manifest.shard_set_bytes,
            state=pb.SERVER_STATE_READY,
        )

    def chunks(
        self, request: pb.DownloadRequest, size: int = 1 << 20
    ) -> Iterator[pb.DownloadChunk]:
        """The files of the model, in pieces of `size`."""
        entry = self.manifest.file(KIND_OF[request.file])
        data = (self.files.directory / entry.name).read_bytes()
        for at in range(request.offset, len(data), size):
            yield self.chunk(request, at, data[at : at + size])

    def chunk(self, request: pb.DownloadRequest, offset: int, data: bytes) -> pb.DownloadChunk:
        """One that fits the manifest."""
        return codec.encode_chunk(
            data,
            shard_set=self.manifest.shard_set_bytes,
            shard=request.shard,
            offset=offset,
            file_bytes=self.manifest.file(KIND_OF[request.file]).bytes,
        )

    def end(self) -> None:
        """Stops at once."""
        self.ended.set()
        self._server.stop(0).wait()


@pytest.fixture
def liar(files: ModelFiles) -> Iterator[Liar]:
    """Honest until a test changes it."""
    running = Liar(files)
    yield running
    running.end()


def altered(manifest: layout.Manifest, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The text of a manifest with other content, named and checked as that content wants."""
    content = json.loads(manifest.text)
    change(content)
    content["shard_set"] = layout.shard_set_id(content)
    content["check"] = layout.manifest_check(content)
    return layout.canonical_text(content)


def said_of(text: bytes) -> Callable[[pb.DescribeRequest], pb.DescribeReply]:
    """Describes a manifest of this text, whether or not it is one."""
    name = json.loads(text)["shard_set"]
    named = bytes.fromhex(name) if isinstance(name, str) else b""
    return lambda _: pb.DescribeReply(manifest=text, shard_set=named, state=pb.SERVER_STATE_READY)


def failure(liar: Liar, cache: Path) -> DlmError:
    """What a client raises that connects to it; fails where it does not end."""
    config = ClientConfig(connect_s=CONNECT_S, cache_dir=cache)
    caught: list[BaseException] = []

    def connect() -> None:
        try:
            Client.connect([liar.address], config).close()
        except BaseException as exc:  # noqa: BLE001 - handed to the test
            caught.append(exc)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive(), "the client hangs"
    (error,) = caught
    assert isinstance(error, DlmError), repr(error)
    return error


def kept(cache: Path) -> int:
    """Bytes in a cache folder."""
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


def of_file(place: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the entry of a file."""
    return lambda content: content["files"][place].update(fields)


def all_counted(order: int, ngrams: int) -> Callable[[dict[str, Any]], None]:
    """More n-grams of an order, and as many in the file that holds them."""

    def change(content: dict[str, Any]) -> None:
        more = ngrams - content["counts"][order - 1]
        content["counts"][order - 1] = ngrams
        content["files"][1 if order <= 2 else 2]["ngrams"] += more

    return change


CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a vocabulary of 2^50 bytes": of_file(0, bytes=1 << 50),
    "low orders of 2^50 bytes": of_file(1, bytes=1 << 50),
    "low orders of some more bytes than they can have": of_file(1, bytes=1 << 18),
    "a negative size": of_file(1, bytes=-1),
    "a size that is no whole number": of_file(1, bytes=1e3),
    "a size of 400 digits": of_file(1, bytes=10**400),
    "a path": of_file(0, name="../../vocabulary.arrow"),
    "an absolute path": of_file(1, name="/tmp/low_orders.arrow"),
    "more 2-grams than pairs of words": all_counted(2, 1 << 31),
    "2^40 2-grams": all_counted(2, 1 << 40),
    "3-grams without prefixes": all_counted(3, 1 << 31),
    "counts that are not the files'": lambda c: c["counts"].__setitem__(1, c["counts"][1] + 1),
    "more counts than orders": lambda c: c["counts"].append(0),
    "another order": lambda c: c.update(order=5),
    "order 255": lambda c: c.update(order=255),
    "no words": lambda c: (all_counted(1, 0)(c), c.update(unk_in_model=True)),
    "too many words for ids": all_counted(1, 1 << 33),
    "a slot of no shard": lambda c: c["slots"].__setitem__(7, 1),
    "4,095 slots": lambda c: c["slots"].pop(),
    "no shards": lambda c: c["files"].pop(),
    "a file twice": lambda c: c["files"].insert(1, c["files"][0]),
    "an unknown encoding": lambda c: c.update(encoding="\x1b[2J"),
    "an unknown feature": lambda c: c.update(features=["\x1b[2J\u202e"]),
    "a list for an id": lambda c: c.update(model=[]),
    "no files": lambda c: c.update(files={}),
}


@pytest.mark.promise("false_claims")
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_a_protocol_error(liar, tmp_path, name) -> None:
    """Before anything is fetched; the message shows no control character."""
    liar.describe = said_of(altered(liar.manifest, CONTRADICTIONS[name]))
    error = failure(liar, tmp_path / "cache")
    assert type(error) is ProtocolError
    assert liar.address in str(error)
    assert str(error).isprintable()
    assert kept(tmp_path) == 0


DESCRIPTIONS: dict[str, Callable[[pb.DescribeReply], object]] = {
    "a shard that the set lacks": lambda r: setattr(r, "shard", 1),
    "shard 2^32 - 1": lambda r: setattr(r, "shard", (1 << 32) - 1),
    "another shard set": lambda r: setattr(r, "shard_set", b"x" * 16),
    "no shard set": lambda r: setattr(r, "shard_set", b""),
    "no manifest": lambda r: setattr(r, "manifest", b""),
    "a manifest of numbers": lambda r: setattr(r, "manifest", b"1" * 5000),
    "a manifest of brackets": lambda r: setattr(r, "manifest", b"[" * 1_000_000),
    "a manifest of 32 MiB": lambda r: setattr(r, "manifest", r.manifest + b" " * (32 << 20)),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_that_contradicts_its_manifest_is_a_protocol_error(
    liar, tmp_path, name
) -> None:
    """Or one without a manifest that can be read."""

    def describe(request: pb.DescribeRequest) -> pb.DescribeReply:
        reply = liar.honest(request)
        DESCRIPTIONS[name](reply)
        return reply

    liar.describe = describe
    assert type(failure(liar, tmp_path / "cache")) is ProtocolError


def test_one_server_cannot_hold_a_set_many_times(liar, files, tmp_path) -> None:
    """It lists sets without end and describes one of them each time, as another shard: it would
    outvote servers that tell the truth."""
    many = files.again(8)
    names = [many.manifest.shard_set_bytes, *(bytes([n]) * 16 for n in range(1, 60))]

    def describe(request: pb.DescribeRequest) -> pb.DescribeReply:
        shard = names.index(request.shard_set) % 8 if request.shard_set else 0
        return pb.DescribeReply(
            manifest=many.manifest.text,
            shard_set=many.manifest.shard_set_bytes,
            shard=shard,
            shard_sets=names,
        )

    liar.describe = describe
    truth = files.again(3)
    with Cluster(truth) as cluster:
        config = ClientConfig(cache_dir=tmp_path / "cache")
        with Client.connect([liar.address, *cluster.addresses], config) as client:
            assert client.manifest.shard_set == truth.manifest.shard_set


def endless(liar: Liar, size: int, pause_s: float) -> Callable[..., Iterator[pb.DownloadChunk]]:
    """Chunks that all fit, for as long as anybody reads."""

    def download(request: pb.DownloadRequest) -> Iterator[pb.DownloadChunk]:
        entry = liar.manifest.file(KIND_OF[request.file])
        for at in itertools.count(request.offset, size):
            if liar.ended.wait(pause_s):
                return
            yield liar.chunk(request, at, bytes(min(size, max(entry.bytes - at, 1))))

    return download


def claiming(liar: Liar, **fields: Any) -> None:
    """Has it claim a manifest whose vocabulary has these fields."""
    text = altered(liar.manifest, of_file(0, **fields))
    liar.manifest = layout.parse_manifest(text)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "pause_s"), [(1, 1.0), (1 << 14, 0.1)])
def test_a_download_that_trickles_ends_in_time_and_goes_on_from_there(
    liar, files, tmp_path, size, pause_s
) -> None:
    """A byte a second, or 160 KiB, less than a MiB in its time: what the counts allow would take
    days, or minutes. The error may be retried; an honest server then gives the rest, or all."""
    claiming(liar, bytes=40 << 20)
    liar.download = endless(liar, size, pause_s)
    cache = tmp_path / "cache"
    error = failure(liar, cache)
    assert isinstance(error, UnavailableError) and error.retryable
    assert any("bytes of vocabulary.arrow arrived" in note for note in error.__notes__)
    begun = kept(cache)
    assert 0 < begun < 40 << 20
    failure(liar, cache)
    assert kept(cache) > begun


def full_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A disk with so much room left."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_what_the_disk_has_no_room_for_is_not_begun(liar, tmp_path, monkeypatch) -> None:
    """Though the counts allow it; a setting to change, as any full disk."""
    claiming(liar, bytes=40 << 20)
    full_disk(monkeypatch, 100 << 20)
    asked = []
    liar.download = lambda request: asked.append(request) or iter(())
    error = failure(liar, tmp_path / "cache")
    assert isinstance(error, ConfigError)
    assert "are free" in str(error) and "DLM_CACHE_DIR" in str(error)
    assert asked == []
    assert kept(tmp_path) == 0


@pytest.mark.slow
def test_what_liars_left_does_not_fill_the_disk(liar, files, tmp_path, monkeypatch) -> None:
    """A new shard set at each try leaves something at each; where there is too little room, or
    after a day, it is removed, unless a process is at it."""
    cache = tmp_path / "cache"
    honest = liar.manifest
    for number in range(3):
        liar.manifest = honest
        claiming(liar, bytes=(40 << 20) + number)
        liar.download = endless(liar, 1 << 16, 0.1)
        failure(liar, cache)
    assert len(list(cache.glob("*.part"))) == 3
    old = min(cache.glob("*.part"))
    os.utime(old, (0, 0))
    liar.manifest, liar.download = honest, liar.chunks
    config = ClientConfig(cache_dir=cache)
    Client.connect([liar.address], config).close()
    assert len(list(cache.glob("*.part"))) == 2
    assert not old.exists()
    shutil.rmtree(cache / honest.shard_set)
    full_disk(monkeypatch, 0)
    failure(liar, cache)
    assert list(cache.glob("*.part")) == []


def test_a_set_of_the_same_model_with_other_numbers_is_refused(liar, files, tmp_path) -> None:
    """After a resharding the low orders stay; a manifest that allows more ids than they hold words
    would have the kernel read where nothing is."""
    text = altered(
        files.manifest, lambda c: (all_counted(1, 1 << 20)(c), c["provenance"].update(later=1))
    )
    described = [files.manifest.text, text]

    def describe(_: pb.DescribeRequest) -> pb.DescribeReply:
        return said_of(described[0])(_)

    def refuse(request: codec.ScoreRequest) -> bytes:
        described[:1] = []
        described.append(text)
        return codec.encode_refusal(request.sequence, Reason.WRONG_SHARD_SET, "resharded")

    liar.describe, liar.score = describe, refuse
    config = ClientConfig(cache_dir=tmp_path / "cache", deadline_s=60.0)
    with Client.connect([liar.address], config) as client:
        utterance = client.utterance()
        with pytest.raises(DlmError) as caught:
            ask(utterance, files.oracle, queries_to(files, 0)[:3])
        assert client.manifest.shard_set == files.manifest.shard_set
    assert any("counts" in note for note in caught.value.__notes__)


TEXTS = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\nok\u202egnp.exe\u2066\u200b\x7f"


def arrow_file(**columns: pa.Array) -> bytes:
    """An Arrow file of one row that says that it is low orders."""
    schema = pa.schema(
        [pa.field(name, array.type) for name, array in columns.items()],
        metadata={"dlm.format_version": str(layout.FORMAT_VERSION), "dlm.kind": "low_orders"},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(list(columns.values()), schema=schema))
    return bytes(sink.getvalue())


def struct_columns() -> bytes:
    """A column of a type whose name is text."""
    column = pa.array([{TEXTS: 1}])
    return arrow_file(**dict.fromkeys(layout.LOW_ORDER_COLUMNS, column))


def numbers(seed: int) -> bytes:
    """The right columns, with random numbers in them."""
    rng = np.random.default_rng(seed)
    columns = {}
    for name, (dtype, *_) in layout.LOW_ORDER_COLUMNS.items():
        values = pa.array(np.frombuffer(rng.bytes(dtype.itemsize * 9), dtype))
        columns[name] = pa.LargeListArray.from_arrays(pa.array([0, 9], pa.int64()), values)
    return arrow_file(**columns)


@pytest.mark.parametrize(
    "content",
    [b"\x1b[2J" * 100, struct_columns(), *map(numbers, range(3)), None],
    ids=["no Arrow", "other types", *("numbers" for _ in range(3)), "of another model"],
)
def test_files_that_are_whole_and_nothing_that_can_be_used_are_a_protocol_error(
    liar, files, tmp_path, content
) -> None:
    """Their checksums are the manifest's, since the server made that too."""
    if content is None:
        other = build(random_model(62, order=4, words=50, per_order=300), tmp_path / "other", 1)
        content = (other.directory / "low_orders.arrow").read_bytes()
    entry = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    liar.manifest = layout.parse_manifest(altered(liar.manifest, of_file(1, **entry)))

    def download(request: pb.DownloadRequest) -> Iterator[pb.DownloadChunk]:
        if KIND_OF[request.file] == "low_orders":
            return iter([liar.chunk(request, 0, content)])
        return liar.chunks(request)

    liar.download = download
    cache = tmp_path / "cache"
    error = failure(liar, cache)
    assert type(error) is ProtocolError
    assert str(error).isprintable()
    assert kept(cache) == 0


def test_words_that_the_manifest_does_not_count_are_a_protocol_error(liar, tmp_path) -> None:
    """Ids up to what it counts would be looked up where there is nothing."""
    more = all_counted(1, 1 << 20)
    liar.manifest = layout.parse_manifest(altered(liar.manifest, more))
    assert type(failure(liar, tmp_path / "cache")) is ProtocolError
    assert kept(tmp_path) == 0


@pytest.mark.promise("false_claims")
@pytest.mark.parametrize("how", ["details", "refusal", "reason"])
def test_text_of_a_server_reaches_no_terminal_as_it_is(liar, files, tmp_path, how) -> None:
    """Neither escapes nor controls of either set, line ends, or what turns the direction of text;
    and no more than a screenful."""
    long = TEXTS + "x" * 100_000
    config = ClientConfig(cache_dir=tmp_path / "cache", deadline_s=60.0)
    if how == "details":

        def abort(_: Any) -> Any:
            raise RuntimeError(TEXTS + "x" * 3000)  # goes into the details of the status

        liar.describe = abort
        error = failure(liar, tmp_path / "cache")
    else:
        reason = long if how == "reason" else Reason.INTERNAL
        liar.score = lambda request: codec.encode_refusal(request.sequence, reason, long)
        with (
            Client.connect([liar.address], config) as client,
            pytest.raises(DlmError) as caught,
        ):
            ask(client.utterance(), files.oracle, queries_to(files, 0)[:3])
        error = caught.value
    shown = "".join([str(error), *getattr(error, "__notes__", [])])
    assert shown.isprintable()
    assert "owned" in shown
    assert len(shown) < 5000
