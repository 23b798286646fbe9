"""The low orders on a client: fetched once, resumed, checked, and never used damaged."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import forked
from client.scripted import FileServer
from cluster import ROOT, WAIT_S, ModelFiles, build
from dlm.client.census import fetch
from dlm.client.router import LowGrams
from dlm.errors import ConfigError, DeadlineExceeded, Overloaded, ProtocolError, ShardDown
from dlm.index import layout
from dlm.progress import compiling_notice
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from models import random_model

TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A small sharded model."""
    model = random_model(11, order=4, words=40, per_order=200)
    return build(model, tmp_path_factory.mktemp("low"), 2)


@pytest.fixture
def server(files: ModelFiles) -> FileServer:
    """Hands out the files of the model."""
    return FileServer(files.directory, files.manifest)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where low orders are kept."""
    return tmp_path / "cache"


def name_of(files: ModelFiles, kind: str) -> str:
    """Name of a file."""
    return files.manifest.file(kind).name


def damaged(files: ModelFiles, folder: Path) -> FileServer:
    """A server whose low orders were damaged on its disk; its chunks are well-formed."""
    shutil.copytree(files.directory, folder)
    path = folder / name_of(files, "low_orders")
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    return FileServer(folder, files.manifest, "damaged:1")


class Clock:
    """It runs only while somebody sleeps, or is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Takes no time."""
        self.now += seconds


def fetched(
    manifest: layout.Manifest, servers: list[FileServer], cache: Path, clock: Clock | None = None
) -> LowGrams:
    """`fetch` from the servers in this order."""
    clock = clock or Clock()
    seams = {"clock": clock, "sleep": clock.sleep, "shuffle": lambda sources: None}
    return fetch(manifest, list(enumerate(servers, 3)), cache, TIMEOUT_S, **seams)


def check(grams: LowGrams, files: ModelFiles) -> None:
    """Fails unless `grams` are the model's own."""
    for kind in ("vocabulary", "low_orders"):
        name = name_of(files, kind)
        assert (grams.directory / name).read_bytes() == (files.directory / name).read_bytes()
    assert grams.vocabulary == files.oracle.vocabulary


def test_what_was_downloaded_is_used_again_without_a_server(files, server, cache) -> None:
    """The first fetch asks for each file once, of the shard that the server is, the second for
    none; without a server and without what was kept the error is typed."""
    with pytest.raises(ShardDown):
        fetched(files.manifest, [], cache)
    check(fetched(files.manifest, [server], cache), files)
    assert server.offsets == [("vocabulary", 0), ("low_orders", 0)]
    assert server.shards == {3}
    check(fetched(files.manifest, [], cache), files)
    assert sorted(p.name for p in cache.iterdir()) == [
        files.manifest.shard_set,
        f"{files.manifest.shard_set}.lock",
    ]


@pytest.mark.promise("downloads")
@pytest.mark.parametrize("kind", ["vocabulary", "low_orders"])
def test_an_interrupted_download_goes_on_at_the_byte_where_it_stopped(
    files, server, cache, kind: str
) -> None:
    """The second fetch asks from the end of the last whole chunk."""
    server.breaks_at, server.fault = 300, DeadlineExceeded("late")
    if kind == "low_orders":
        # The vocabulary is fetched already; only the second file breaks.
        part = cache / f"{files.manifest.shard_set}.part"
        part.mkdir(parents=True)
        shutil.copy(files.directory / name_of(files, "vocabulary"), part)
    with pytest.raises(DeadlineExceeded, match="late"):
        fetched(files.manifest, [server], cache)
    assert not (cache / files.manifest.shard_set).exists()
    server.breaks_at = None
    server.offsets.clear()
    check(fetched(files.manifest, [server], cache), files)
    assert (kind, 300) in server.offsets
    assert (kind, 0) not in server.offsets


@pytest.mark.parametrize(("wrong", "more"), [(False, []), (True, [("low_orders", 0)])])
def test_the_next_server_goes_on_where_the_first_broke_off(
    files, server, cache, tmp_path, wrong: bool, more: list[tuple[str, int]]
) -> None:
    """One fetch, two servers. If the beginning was wrong, the second is then asked for all."""
    first = (
        damaged(files, tmp_path / "bad") if wrong else FileServer(files.directory, files.manifest)
    )
    first.breaks_at, first.fault = 200, ShardDown("gone")
    check(fetched(files.manifest, [first, server], cache), files)
    assert server.offsets == [("vocabulary", 200), ("low_orders", 200), *more]


def resealed(chunk: pb.DownloadChunk, data: bytes) -> pb.DownloadChunk:
    """A well-formed chunk with other bytes."""
    return codec.encode_chunk(
        data,
        shard_set=chunk.shard_set,
        shard=chunk.shard,
        offset=chunk.offset,
        file_bytes=chunk.file_bytes,
    )


def damaged_chunk(chunk: pb.DownloadChunk) -> pb.DownloadChunk:
    """As the network damages one."""
    chunk.checksum ^= 1
    return chunk


ALTERATIONS = {  # of each field alone: see tests/wire/test_codec.py
    "another checksum": damaged_chunk,
    "empty for ever": lambda c: resealed(c, b""),
    "more than the file": lambda c: resealed(c, bytes(c.file_bytes + 1)),
    "a gap": lambda c: None if c.offset == 0 else c,
    "an early end": lambda c: None if c.offset > 100 else c,
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_a_chunk_that_is_not_what_was_asked_is_refused_and_the_next_server_asked(
    files, server, cache, name: str
) -> None:
    """Alone: ProtocolError, and nothing is kept; with another server: its files."""
    server.alter = ALTERATIONS[name]
    with pytest.raises(ProtocolError):
        fetched(files.manifest, [server], cache)
    assert not (cache / files.manifest.shard_set).exists()
    assert server.streams == 0  # a reader that stopped half-way lets go of the stream
    good = FileServer(files.directory, files.manifest)
    check(fetched(files.manifest, [server, good], cache), files)


def test_well_formed_chunks_of_a_damaged_file_are_told_by_the_manifest(
    files, server, cache, tmp_path
) -> None:
    """ProtocolError names the server and the command that looks; a good server still serves."""
    bad = damaged(files, tmp_path / "bad")
    with pytest.raises(ProtocolError, match=r"damaged:1 .*dlm verify"):
        fetched(files.manifest, [bad], cache)
    assert bad.offsets.count(("low_orders", 0)) == 1
    check(fetched(files.manifest, [bad, server], cache), files)


@pytest.mark.parametrize("left", [b"x" * 350, b"x" * 10_000_000, b""])
def test_wrong_bytes_left_by_an_earlier_try_are_thrown_away(files, server, cache, left) -> None:
    """Too long, or wrong: the file is fetched anew, from the same server."""
    part = cache / f"{files.manifest.shard_set}.part"
    part.mkdir(parents=True)
    for kind in ("vocabulary", "low_orders"):
        (part / name_of(files, kind)).write_bytes(left)
    check(fetched(files.manifest, [server], cache), files)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (kind, how)
        for kind in ("vocabulary", "low_orders", "manifest")
        for how in ("flipped", "truncated", "missing", "a folder")
        if (kind, how) != ("manifest", "a folder")
    ],
)
def test_a_damaged_cache_is_fetched_anew(files, server, cache, kind: str, how: str) -> None:
    """Whatever happened to a file since it was kept."""
    kept = fetched(files.manifest, [server], cache).directory
    path = kept / (layout.MANIFEST if kind == "manifest" else name_of(files, kind))
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "flipped":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "a folder":
        path.mkdir()
    server.offsets.clear()
    check(fetched(files.manifest, [server], cache), files)
    assert server.offsets == [("vocabulary", 0), ("low_orders", 0)]


def test_a_cache_of_another_shard_set_under_this_name_is_not_used(files, server, cache) -> None:
    """The folder's name is no proof; its manifest is."""
    other = files.again(3)
    fetched(other.manifest, [FileServer(other.directory, other.manifest)], cache).directory.rename(
        cache / files.manifest.shard_set
    )
    check(fetched(files.manifest, [server], cache), files)


def test_a_cache_folder_that_cannot_be_made_is_a_setting_to_change(files, server, tmp_path) -> None:
    """The message names the folder and the variable."""
    (tmp_path / "file").write_bytes(b"")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"file.*DLM_CACHE_DIR"):
            fetched(files.manifest, [server], cache)


def test_a_full_disk_is_a_setting_to_change(files, server, cache, monkeypatch) -> None:
    """Nothing half-written is taken for whole afterwards."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            fetched(files.manifest, [server], cache)
    assert not (cache / files.manifest.shard_set).exists()
    check(fetched(files.manifest, [server], cache), files)


CHILD = """
import sys
from pathlib import Path
from client.scripted import FileServer
from dlm.client.census import fetch
from dlm.index.layout import read_manifest
directory, cache, sleep_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
manifest = read_manifest(directory)
server = FileServer(directory, manifest)
now = 0.0

def sleep(seconds):  # for so long, whatever it is for
    global now
    now += sleep_s

print("ready", flush=True)
for line in sys.stdin:
    more = {"clock": lambda: now, "sleep": sleep} if sleep_s else {}
    grams = fetch(manifest, [(0, server)], cache, 300.0, **more)
    assert len(grams.vocabulary.words) == manifest.vocabulary_size
    print(len(server.offsets), flush=True)
"""


class Child:
    """A process that fetches into the cache, each time it is told to.

    Args
        sleep_s  what it takes for the time that a wait for the lock took; 0 for the true time
    """

    def __init__(self, files: ModelFiles, cache: Path, sleep_s: float = 0.0) -> None:
        self.process = forked.Popen(
            [sys.executable, "-c", CHILD, str(files.directory), str(cache), str(sleep_s)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.says() == "ready\n"

    def begin(self) -> None:
        """It fetches."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def says(self) -> str:
        """How many downloads it has begun so far, once it has everything."""
        return self.process.stdout.readline()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0


@pytest.fixture
def begun(files, server, cache) -> Callable[[], None]:
    """A download of another thread stands still in the middle, until this is called: it returns
    once that has ended."""
    server.gate.clear()
    first = threading.Thread(target=fetch, args=(files.manifest, [(0, server)], cache, WAIT_S))
    first.start()
    assert server.entered.wait(WAIT_S)

    def end() -> None:
        server.gate.set()
        first.join(WAIT_S)

    return end


def test_two_processes_at_once_download_once(files, server, cache, begun) -> None:
    """The second begins while the first is in the middle; it finds everything there."""
    with Child(files, cache) as child:
        child.begin()
        begun()
        assert child.says() == "0\n"
    assert server.offsets == [("vocabulary", 0), ("low_orders", 0)]


def test_a_child_forked_during_a_download_does_not_keep_the_lock(
    files, server, cache, begun
) -> None:
    """The child lives on with the open file; the next who needs the lock gets it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    try:
        begun()
        shutil.rmtree(cache / files.manifest.shard_set)
        again = threading.Thread(
            target=fetch, args=(files.manifest, [(0, server)], cache, TIMEOUT_S), daemon=True
        )
        again.start()
        again.join(WAIT_S)
        assert not again.is_alive()
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_servers_that_have_no_time_are_asked_again_later(files, server, cache) -> None:
    """An Overloaded server is not given up before the time is over."""

    class Busy(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now > 3:
                server.breaks_at = None

    clock = Busy()
    server.breaks_at, server.fault = 0, Overloaded("4 downloads are running")
    check(fetched(files.manifest, [server], cache, clock), files)
    assert 3 < clock.now < TIMEOUT_S


@pytest.mark.parametrize("enough", [100, codec.CHUNK_BYTES])
def test_the_time_of_a_download_counts_from_its_last_progress(
    files, server, cache, monkeypatch, enough: int
) -> None:
    """A slow one is fetched whole, whatever it takes, and shown; one that only trickles ends."""
    monkeypatch.setattr("dlm.client.census.PROGRESS_BYTES", enough)
    monkeypatch.setattr("dlm.client.census.SHOWN_BYTES", 1000)
    lines: list[str] = []
    monkeypatch.setattr(compiling_notice, "tell", lines.append)
    clock = Clock()

    def slow(chunk: pb.DownloadChunk) -> pb.DownloadChunk:
        clock.sleep(0.9 * TIMEOUT_S)
        return chunk

    server.alter = slow
    with contextlib.nullcontext() if enough == 100 else pytest.raises(DeadlineExceeded):
        fetched(files.manifest, [server], cache, clock)
    assert str(cache) in lines[0]
    assert (clock.now > 5 * TIMEOUT_S) == (enough == 100)


def test_users_of_one_group_share_a_cache(files, server, cache) -> None:
    """By the umask, as all else in it: who comes second can open the first one's lock."""
    mask = os.umask(0o002)
    try:
        fetched(files.manifest, [server], cache)
    finally:
        os.umask(mask)
    assert (cache / f"{files.manifest.shard_set}.lock").stat().st_mode & 0o777 == 0o664


def test_a_process_that_sits_on_the_lock_keeps_nobody_out(files, server, cache) -> None:
    """After its time the second fetches into a folder of its own."""
    cache.mkdir()
    with (cache / f"{files.manifest.shard_set}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        check(fetched(files.manifest, [server], cache), files)
    assert {path.name for path in cache.iterdir()} == {
        files.manifest.shard_set,
        f"{files.manifest.shard_set}.lock",
    }


@pytest.mark.slow
def test_processes_that_mend_a_damaged_copy_at_once_all_have_a_whole_one(files, cache) -> None:
    """Nobody waits for the lock; neither removes what the other just mended, and nothing is left
    beside it."""
    home = cache / files.manifest.shard_set
    path = home / name_of(files, "low_orders")
    with contextlib.ExitStack() as stack:
        menders = [stack.enter_context(Child(files, cache, 200.0)) for _ in range(3)]
        for damage in range(20):
            for mender in menders:
                mender.begin()
            assert all(mender.says() for mender in menders)
            LowGrams.open(home, files.manifest)
            if damage % 2:
                path.write_bytes(path.read_bytes()[:-1])
            else:
                path.unlink()
    assert len([p for p in cache.iterdir() if p.suffix not in (".lock", ".part")]) == 1
