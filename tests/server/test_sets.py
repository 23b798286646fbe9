"""dlm.server.sets: a server follows the list of its shard sets, or keeps what it serves."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from cluster import WAIT_S, ThreadServer, gone, until
from dlm.client.cluster_file import Endpoint
from dlm.client.server import Connection
from dlm.cluster.status import ClusterStatus
from dlm.errors import ConfigError
from dlm.files import write_whole
from dlm.index.layout import MANIFEST, read_manifest
from dlm.index.search.shard import Shard
from dlm.server.config import ServerConfig
from dlm.server.sets import (
    GIVE_WAY_S,
    TURN_S,
    FollowedSets,
    Turn,
    check_memory,
    listed,
    read_sets,
    write_sets,
)
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason, reason_of
from http2 import Peer
from server.calls import Caller, Stream, outcome

# ------------------------------------------------------------------------------------ the list


@pytest.mark.parametrize("text", ["", "# none\n", "a", "a\na\n", "a\n" * 65, "a\0b\n"])
def test_a_list_of_another_form_is_rejected(tmp_path, text):
    """Empty, half-written, twice the same, too long, with zero bytes."""
    (tmp_path / "sets").write_text(text)
    with pytest.raises(ConfigError, match="sets"):
        read_sets(tmp_path / "sets")


def test_folders_are_relative_to_the_list(tmp_path):
    """A comment and an empty line are no folder."""
    (tmp_path / "sets").write_text("# models\n\n new \n/srv/old\n")
    assert read_sets(tmp_path / "sets") == [tmp_path / "new", Path("/srv/old")]


def test_a_list_that_is_replaced_keeps_its_owner_its_mode_and_a_link_to_it(tmp_path):
    """Whoever writes it, with whatever umask: its servers must still read it."""
    path, link = tmp_path / "sets", tmp_path / "link"
    path.write_text("a\n")
    path.chmod(0o644)
    link.symlink_to(path)
    before = os.umask(0o077)
    try:
        write_sets(link, [tmp_path / "new"])
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert read_sets(path) == [tmp_path / "new"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_two_models_must_fit_in_memory(sharded):
    """The message names what is needed and what is free."""
    found = [(sharded.directory, read_manifest(sharded.directory))]
    check_memory(found, 0, lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"are free"):
        check_memory(found, 0, lambda: 1000)


def test_a_list_of_which_no_set_has_the_shard_does_not_start_a_server(tmp_path, other):
    """`other` has two shards."""
    (tmp_path / "sets").write_text(f"{other.directory}\n")
    with pytest.raises(ConfigError, match="shard 2"):
        FollowedSets(ServerConfig(sets=str(tmp_path / "sets")), 2)


@pytest.fixture
def following(tmp_path, sharded):
    """Follows a list of one set; and how to write the list."""
    path = tmp_path / "sets"
    write_sets(path, [sharded.directory])
    made = FollowedSets(ServerConfig(sets=str(path)), 0, turn=Turn(f"test-{tmp_path}"))
    yield made, lambda *all_: write_sets(path, [one.directory for one in all_])
    made.close()


def ids(*all_):
    """As a server is told to serve them."""
    return listed([one.directory for one in all_], 0)


def test_new_sets_are_checked_and_a_list_of_those_that_are_served_is_not(following, sharded, other):
    """They count as served once they are; another order changes the default."""
    sets, write = following
    write(sharded, other)
    until(lambda: sets.look() or sets.checking)
    assert sets.checking == ids(sharded, other)
    assert until_given(sets) == ids(sharded, other)
    assert (sets.serving, sets.checking) == (ids(sharded), None)
    sets.loaded()
    assert sets.serving == ids(sharded, other)
    write(other, sharded)
    assert until_given(sets) == ids(other, sharded)


@pytest.mark.parametrize("fails", ["check", "load"])
def test_a_list_that_cannot_be_served_changes_nothing(following, sharded, other, tmp_path, fails):
    """The reason is kept until the list changes."""
    sets, write = following
    bad = SimpleNamespace(directory=tmp_path / "bad")
    shutil.copytree(other.directory, bad.directory)
    if fails == "check":
        with (bad.directory / other.manifest.file("shard", 0).name).open("r+b") as file:
            file.seek(4000)
            file.write(bytes(16))
        write(sharded, bad)
        until(lambda: sets.look() or sets.rejected)
    else:
        write(sharded, bad)
        until_given(sets)
        sets.loaded("no room")
    assert str(bad.directory) in sets.rejected or fails == "load"
    assert sets.serving == ids(sharded)
    sets.loaded("late")  # of nothing that was given
    assert sets.rejected not in ("", "late")
    write(sharded)
    until(lambda: sets.look() or not sets.rejected)


def test_a_list_that_changes_during_the_check_is_checked_anew(following, sharded, other):
    """What is loaded is what was checked."""
    sets, write = following
    write(sharded, other)
    until(lambda: sets.look() or sets.checking)
    reader = sets._child._process.pid
    os.kill(reader, signal.SIGSTOP)
    write(other)
    until(lambda: sets.look() or sets.checking == ids(other))
    assert gone(reader)
    assert until_given(sets) == ids(other)


def until_given(sets):
    """What is to be served, once it is known."""
    given = []
    until(lambda: given.append(sets.look()) or given[-1])
    return given[-1]


@pytest.mark.promise("loads_in_turn")
def test_servers_of_a_machine_load_one_after_another(tmp_path, sharded, other):
    """The second has its files checked once the first serves the list; and a list that needs no
    loading waits for nobody."""
    path, turns = tmp_path / "sets", [Turn(f"test-{tmp_path}") for _ in range(2)]
    write_sets(path, [sharded.directory])
    config = ServerConfig(sets=str(path))
    first, second = (FollowedSets(config, 0, turn=turn) for turn in turns)
    write_sets(path, [sharded.directory, other.directory])
    until(first.look)
    for _ in range(5):
        second.look()
    assert second.checking is None
    first.loaded()
    until(second.look)
    write_sets(path, [sharded.directory])
    until(first.look)
    for one in (first, second):
        one.close()


def test_what_gives_way_for_a_minute_then_does_no_longer(tmp_path, sharded, other):
    """On a machine whose cores are all busy it might never end."""
    path, now = tmp_path / "sets", [0.0]
    write_sets(path, [sharded.directory])
    following = FollowedSets(
        ServerConfig(sets=str(path)), 0, turn=Turn(f"test-{tmp_path}"), clock=lambda: now[0]
    )
    write_sets(path, [sharded.directory, other.directory])
    until(lambda: following.look() or following.checking)
    assert following._child is not None
    reader = following._child._process.pid
    os.kill(reader, signal.SIGSTOP)
    now[0] = GIVE_WAY_S
    until(following.look)
    assert gone(reader)
    following.close()


def test_a_folder_on_a_disk_that_fails_is_rejected(following, tmp_path, sharded):
    """Its manifest can be opened and not read; the server lives on."""
    sets, write = following
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / MANIFEST).symlink_to("/proc/self/mem")  # an input/output error at its first byte
    write(sharded, SimpleNamespace(directory=bad))
    until(lambda: sets.look() or sets.rejected)
    assert sets.serving == ids(sharded)


def test_a_server_that_waited_long_for_its_turn_loads(tmp_path):
    """Whoever holds it may never let go."""
    now = [0.0]
    holder, waiting = (Turn(f"test-{tmp_path}", lambda: now[0]) for _ in range(2))
    assert holder.take()
    assert not waiting.take()
    now[0] = TURN_S
    assert waiting.take()
    waiting.leave()
    assert not waiting.take()
    holder.leave()
    assert waiting.take()
    waiting.leave()


# ------------------------------------------------------------------------------------ a server


def held(caller):
    """The shard sets that a server describes, the default first."""
    reply = pb.DescribeReply.FromString(caller.describe(b"", timeout=WAIT_S))
    return [one.hex() for one in reply.shard_sets]


def mapped(server, directory):
    """Whether it has a file of this folder mapped."""
    return f"{directory}/" in Path(f"/proc/{server.process.pid}/maps").read_text()


@pytest.fixture
def listing(tmp_path, start, sharded):
    """A server of shard 0 that follows a list; a caller; and how to write the list."""
    path = tmp_path / "sets"

    def write(*directories):
        write_whole(path, "".join(f"{one}\n" for one in directories).encode())

    write(sharded.directory)
    made = []

    def begin(**config):
        server = start(0, [], sets=str(path), **config).ready()
        made.append(Caller(server.address))
        return server, made[-1], write

    yield begin
    for caller in made:
        caller.close()


def test_a_model_is_loaded_beside_another_and_the_other_is_unloaded(sharded, other, listing):
    """One stream stays open and is answered throughout, each message by the model it names; the
    files of the model that is no longer listed are unmapped."""
    server, caller, write = listing()
    names = [one.manifest.shard_set for one in (sharded, other)]
    assert held(caller) == names[:1]
    stream, rng = Stream(caller), np.random.default_rng(1)

    def ask(number, *models):
        for one in models:
            asked = one.questions.ask(rng, 0)
            stream.put(asked.data, number)
            one.questions.verify(0, asked, stream.take()[1])

    ask(1, sharded)
    write(sharded.directory, other.directory)
    until(lambda: held(caller) == names, server.process)
    ask(2, other, sharded)
    write(other.directory)
    until(lambda: held(caller) == names[1:], server.process)
    gone = sharded.questions.ask(rng, 0)
    assert outcome(caller.score, gone.data).reason is Reason.WRONG_SHARD_SET
    until(lambda: not mapped(server, sharded.directory), server.process)
    assert mapped(server, other.directory)
    ask(3, other)
    stream.end()
    assert server.stop() == 0


@pytest.mark.slow
def test_each_reason_why_a_list_cannot_be_served_is_logged(tmp_path, sharded, other, listing):
    """Nothing changes; the next list that can be served is."""
    server, caller, write = listing()
    half = tmp_path / "half"
    shutil.copytree(other.directory, half)
    shard = half / read_manifest(half).file("shard", 0).name
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    asked = sharded.questions.ask(np.random.default_rng(2), 0)
    for number, wrong in enumerate([[tmp_path / "none"], [half], [sharded.directory] * 2], 1):
        write(sharded.directory, *wrong)
        until(lambda n=number: server.errors.count("sets.rejected") == n, server.process)
        assert held(caller) == [sharded.manifest.shard_set]
        sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
    write(other.directory)
    until(lambda: held(caller) == [other.manifest.shard_set], server.process)
    assert server.stop() == 0


def test_status_shows_the_default_first_and_only_what_is_held_now(sharded, other, tmp_path):
    """As the list says, each time it changes; no row stays as it was."""
    path = tmp_path / "sets"
    write_sets(path, [sharded.directory])
    server = ThreadServer(Shard.open(sharded.directory, 0), own_loop=True, sets=str(path)).ready()
    status = ClusterStatus([Endpoint(server.address)], Connection, WAIT_S)
    for held in ([sharded, other], [other, sharded], [other]):
        write_sets(path, [one.directory for one in held])
        names = [one.manifest.shard_set[:12] for one in held]
        until(lambda names=names: [row.shard_set for row in status.poll().rows] == names)
        before, after = status.poll().rows, status.poll().rows
        assert all(a.uptime_s < b.uptime_s for a, b in zip(before, after, strict=True))
        assert [row.memory_bytes is not None for row in after] == [True, False][: len(held)]
        assert {(row.state, row.queries_per_s) for row in after} == {("ready", 0)}
    status.close()
    server.end()


def test_a_download_of_a_set_that_is_unloaded_ends_with_what_is_tried_again(
    sharded, other, tmp_path, monkeypatch
):
    """It took longer than `shutdown_timeout_s`; the others of the shard may still have the set."""
    monkeypatch.setattr(codec, "CHUNK_BYTES", 700)
    path = tmp_path / "sets"
    write_sets(path, [sharded.directory])
    shard = Shard.open(sharded.directory, 0)
    server = ThreadServer(shard, own_loop=True, sets=str(path), shutdown_timeout_s=0.0).ready()
    caller, entered, gate = Caller(server.address), threading.Event(), threading.Event()
    downloads = server.server.service.downloads
    read = downloads.read_chunk

    def waiting(*asked):
        entered.set()
        assert gate.wait(WAIT_S)
        return read(*asked)

    downloads.read_chunk = waiting
    request = pb.DownloadRequest(
        shard_set=sharded.manifest.shard_set_bytes, file=pb.DOWNLOAD_FILE_LOW_ORDERS
    )
    chunks = caller.download(request.SerializeToString(), timeout=WAIT_S)
    assert entered.wait(WAIT_S)
    write_sets(path, [other.directory])
    until(lambda: not downloads.files)
    gate.set()
    with pytest.raises(grpc.RpcError) as error:
        list(chunks)
    assert reason_of(error.value) is Reason.DRAINING
    caller.close()
    server.end()


@pytest.mark.slow
def test_a_model_is_unmapped_though_a_download_of_it_outlived_its_time(sharded, other, listing):
    """Nobody reads it: it ends ten seconds later."""
    server, caller, write = listing(shutdown_timeout_s=0.1)
    request = pb.DownloadRequest(
        shard_set=sharded.manifest.shard_set_bytes, file=pb.DOWNLOAD_FILE_LOW_ORDERS
    )
    peer = Peer(server.address, window=0)
    peer.ask("/dlm.v1.Shard/Download", request.SerializeToString())
    write(other.directory)
    until(lambda: held(caller) == [other.manifest.shard_set], server.process)
    until(lambda: not mapped(server, sharded.directory), server.process)
    peer.close()
    assert server.stop() == 0
