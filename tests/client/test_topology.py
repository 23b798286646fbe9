"""Where the servers are: cluster.toml, and what servers say of themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import ModelFiles
from dlm.client.topology import (
    NO_LIMIT,
    Endpoint,
    discover,
    read_cluster_file,
    write_cluster_file,
)
from dlm.errors import ConfigError, DlmError, ProtocolError, ShardDown
from dlm.wire._pb import shard_pb2 as pb


def test_a_cluster_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """With shards and without, and again over itself."""
    path = tmp_path / "cluster.toml"
    for endpoints in (
        [Endpoint("a:1", 0), Endpoint("b:2", 1), Endpoint("b:2", 7)],
        [Endpoint("[::1]:5")],
    ):
        write_cluster_file(path, endpoints, shard_set="0" * 32)
        assert read_cluster_file(path) == endpoints
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.toml"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "server = 3",
        "server = []",
        "[[server]]\nshard = 1",
        '[[server]]\naddress = "host"',
        "[[server]]\naddress = 5",
        '[[server]]\naddress = "a:1"\nshard = -1',
        '[[server]]\naddress = "a:1"\nshard = true',
        '[[server]]\naddress = "a:1"\nshard = "0"',
        "[[server",
        "\udcff",
    ],
)
def test_a_cluster_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the file."""
    path = tmp_path / "cluster.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"cluster\.toml"):
        read_cluster_file(path)


def saying(*servers: tuple[str, object]):
    """A `connect` to servers that say this of themselves, or fail with it."""
    said = dict(servers)

    def describe(address: str) -> pb.DescribeReply:
        found = said[address]
        if isinstance(found, DlmError):
            raise found
        return found  # type: ignore[return-value]

    return lambda address: SimpleNamespace(describe=lambda timeout_s: describe(address))


def reply(files: ModelFiles, shard: int, **more) -> pb.DescribeReply:
    """The description of a server that holds `shard`."""
    manifest = files.manifest
    return pb.DescribeReply(
        manifest=manifest.text, shard=shard, shard_set=manifest.shard_set_bytes, **more
    )


def endpoints(*addresses: str) -> list[Endpoint]:
    """Servers of which it is not known what they hold."""
    return [Endpoint(address) for address in addresses]


def test_the_shard_set_of_most_shards_is_taken(files, other_files) -> None:
    """The others are named among the faults."""
    connect = saying(
        ("a:1", reply(other_files, 0)), ("b:1", reply(files, 1)), ("c:1", reply(files, 0))
    )
    topology = discover(endpoints("a:1", "b:1", "c:1"), connect, 1.0)
    assert topology.manifest.shard_set == files.manifest.shard_set
    assert topology.addresses == {0: "c:1", 1: "b:1"}
    assert "holds shard set" in topology.faults["a:1"]


def test_where_servers_are_divided_the_set_in_use_stays(files, other_files) -> None:
    """One shard each: `prefer` decides, whichever it is."""
    connect = saying(("a:1", reply(other_files, 0)), ("b:1", reply(files, 0)))
    for wanted in (files, other_files):
        shard_set = wanted.manifest.shard_set
        topology = discover(endpoints("a:1", "b:1"), connect, 1.0, prefer=shard_set)
        assert topology.manifest.shard_set == shard_set


def test_replicas_do_not_count_as_more_shards(files, other_files) -> None:
    """Three servers of one shard against two of two."""
    connect = saying(
        *((f"a:{i}", reply(other_files, 0)) for i in range(3)),
        *((f"b:{i}", reply(files, i)) for i in range(2)),
    )
    addresses = [f"a:{i}" for i in range(3)] + [f"b:{i}" for i in range(2)]
    topology = discover(endpoints(*addresses), connect, 1.0)
    assert topology.manifest.shard_set == files.manifest.shard_set


def test_a_silent_server_keeps_the_shard_that_is_said_of_it(files) -> None:
    """Unless another answers for that shard, or the set has no such shard."""
    connect = saying(
        ("a:1", ShardDown("gone")),
        ("b:1", reply(files, 1)),
        ("c:1", ShardDown("gone")),
        ("d:1", ShardDown("gone")),
    )
    listed = [Endpoint("a:1", 0), Endpoint("b:1", 1), Endpoint("c:1", 1), Endpoint("d:1", 99)]
    topology = discover(listed, connect, 1.0)
    assert topology.addresses == {0: "a:1", 1: "b:1"}
    assert set(topology.faults) == {"a:1", "c:1", "d:1"}


def test_descriptions_that_cannot_be_used_are_typed_errors(files) -> None:
    """Nobody answers: ShardDown. Somebody does, but not with a manifest: ProtocolError."""
    with pytest.raises(ShardDown, match="a:1: gone"):
        discover(endpoints("a:1"), saying(("a:1", ShardDown("gone"))), 1.0)
    junk = reply(files, 0)
    junk.manifest = junk.manifest[:-9]
    with pytest.raises(ProtocolError, match="a:1"):
        discover(endpoints("a:1"), saying(("a:1", junk)), 1.0)
    topology = discover(
        endpoints("a:1", "b:1"), saying(("a:1", junk), ("b:1", reply(files, 2))), 1.0
    )
    assert topology.addresses == {2: "b:1"}


def test_the_smallest_limit_of_the_servers_holds_for_all(files, other_files) -> None:
    """Of queries or of bytes; servers of another set and servers without limits do not count."""
    connect = saying(
        ("a:1", reply(files, 0, max_queries=500, max_message_bytes=1 << 22)),
        ("b:1", reply(files, 1, max_queries=300)),
        ("c:1", reply(files, 2)),
        ("d:1", reply(other_files, 0, max_queries=1)),
    )
    assert discover(endpoints("a:1", "b:1", "c:1", "d:1"), connect, 1.0).max_queries == 300
    assert discover(endpoints("a:1"), connect, 1.0).max_queries == 500
    assert discover(endpoints("c:1"), connect, 1.0).max_queries == NO_LIMIT
    tiny = saying(("a:1", reply(files, 0, max_message_bytes=10)))
    assert discover(endpoints("a:1"), tiny, 1.0).max_queries == 1
