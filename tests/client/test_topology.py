"""Where the servers are: cluster.toml, and what servers say of themselves."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import ModelFiles
from dlm.client import Client
from dlm.client.census import Census
from dlm.client.cluster_file import (
    MOST_BYTES,
    ClusterFile,
    ClusterToml,
    Endpoint,
    check_model,
    write_cluster_file,
)
from dlm.client.health import NO_LIMIT, Topology
from dlm.client.table import take_census
from dlm.errors import ConfigError, DlmError, ProtocolError, ShardDown
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.ids import MAX_SHARD_SETS

A_SERVER = '[[server]]\naddress = "a:1"\n'
ADDRESSES = [
    *("localhost:1", "10.0.0.12:65535", "lm-dlm-0.space.svc:50060", "[::1]:50060", "a_b-1:7"),
    *("ipv4:1.2.3.4:5,1.2.3.5:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "dns:///name:5"),
    *("[fe80::1%eth0]:5", "dns:name:5", "dns://10.0.0.1/name:5", "unix:/run/dlm.sock"),
    "unix-abstract:dlm",
]
A_ROLLOUT = '[rollout]\nmodel = "abcdef"\nreplaces = "abcdef"\n'
TOKEN = "decoder-" + "d" * 32


def discover(
    listed: Sequence[Endpoint], connect: Callable[[str], Any], **given: str | None
) -> Topology:
    """What a client chooses that asks every server once."""
    given = {"prefer": None, **given}
    return take_census(listed, connect, 60.0).choose(**given)  # type: ignore[arg-type]


def test_a_cluster_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """With shards and without, and again over itself; the small model by an absolute path. What
    gRPC can connect to is taken as it is written."""
    path = tmp_path / "cluster.toml"
    for endpoints in (
        [Endpoint("a:1", 0), Endpoint("b:2", 1), Endpoint("b:2", 7)],
        [Endpoint(address) for address in ADDRESSES],
        [Endpoint("a:1", 0, 4711), Endpoint("b:2", pid=1)],
    ):
        for small in (None, Path("shards")):
            write_cluster_file(path, endpoints, local_fallback=small)
            assert ClusterToml(path).servers() == endpoints
            assert ClusterToml(path).local_fallback() == (small and small.absolute())
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.toml"]


def test_a_cluster_file_names_models(tmp_path: Path) -> None:
    """The small one relative to the file, and the default by the beginning of its id."""
    path = tmp_path / "cluster.toml"
    path.write_text(f'local_fallback = "models/small"\nmodel = "AB12cd"\n{A_SERVER}')
    file = ClusterFile(path)
    before = file.stamp()
    assert (file.model(), len(file())) == ("ab12cd", 1)
    assert ClusterToml(path).local_fallback() == tmp_path / "models/small"
    path.write_text(A_SERVER)
    assert file.model() is None
    assert file.stamp() != before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ""),
        ("server = 3", ""),
        ("server = []", ""),
        ("server = [3]", "server is 3; expected a table"),
        ("[[server]]\nshard = 1", ""),
        ('[[server]]\naddress = "host"', ""),
        ("[[server]]\naddress = 5", ""),
        (f"{A_SERVER}shard = -1", ""),
        (f"{A_SERVER}shard = true", ""),
        (f'{A_SERVER}shard = "0"', ""),
        (f"{A_SERVER}pid = 0", ""),
        (f'{A_SERVER}pid = "7"', ""),
        ("[[server", ""),
        ("\udcff", ""),
        (f'model = "new"\n{A_SERVER}', "'new'"),
        (f"model = 7\n{A_SERVER}", "7"),
        (f"local_fallback = 3\n{A_SERVER}", "local_fallback"),
        (f'local_fallbak = "s"\n{A_SERVER}', "local_fallbak (did you mean local_fallback?)"),
        (
            f"{A_SERVER}shrad = 3",
            "[server] does not have a setting named shrad (did you mean shard",
        ),
        (f"{A_SERVER}zone = 3", "[server] does not have a setting named zone"),
        (f'{A_SERVER}local_fallback = "s"', "local_fallback is below a [[server]]"),
        ('[[servers]]\naddress = "a:1"', "a setting named servers (did you mean server?)"),
        (f"rollout = 1\n{A_SERVER}", "rollout"),
        (f"[rollout]\nshare = 0.1\n{A_SERVER}", "rollout"),
        (f"{A_ROLLOUT}share = 5\n{A_SERVER}", "rollout"),
        (f"{A_ROLLOUT}share = true\n{A_SERVER}", "rollout"),
        (f"{A_ROLLOUT}shares = 0.5\n{A_SERVER}", "rollout"),
        (f"{A_ROLLOUT.replace('abcdef', 'new')}share = 0.5\n{A_SERVER}", "new"),
        (f'token = "{TOKEN}"\n{A_SERVER}', "token_file"),
        (f'[tls]\ntoken = "{TOKEN}"\n{A_SERVER}', "token_file"),
        (f"[tls]\nca = 3\n{A_SERVER}", "tls.ca is 3; expected a string"),
        (f"token_file = 3\n{A_SERVER}", "token_file is 3; expected a string"),
        (f'[tls]\nuse_proxy = "yes"\n{A_SERVER}', "'yes'"),
        (f'tls = "ca.pem"\n{A_SERVER}', "tls is 'ca.pem'; expected a table"),
        (f'[tls]\nauthority = "x"\n{A_SERVER}', "setting named authority"),
        (f'[tls]\nserver_nam = "x"\n{A_SERVER}', "server_nam (did you mean server_name?)"),
        (f'[tls]\ncert = "x"\n{A_SERVER}', "key"),
        ("model = " + "1" * 5000, ""),
    ],
)
def test_a_cluster_file_that_says_something_else_is_refused(
    tmp_path: Path, text: str, says: str
) -> None:
    """With the file, and what was perhaps meant: a misspelt small model would be none, in silence,
    until the servers fail. A token in it is not shown: such files are no secret."""
    path = tmp_path / "cluster.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        file = ClusterToml(path)
        _ = file.servers(), file.model(), file.rollout(), file.security()
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert str(path) in said and says in said and TOKEN not in said


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:99999", "127.0.0.1:-5", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:abc", "host"),
        *("127.0.0.1:65536", "127.0.0.1:5,127.0.0.2:5", ":50060", "", "http://h:50060", "a b:1"),
        *("::1:50060", "[::1]", "[::zz]:5", "[1::2::3]:5", "ipv4:1.2.3.4:0", "dns:///name", "h:1/"),
        *("ipv4:1.2.3.4:5,1.2.3.5:70000", "unix:", "h:1\n", "h:\u0661", "h:+5", "h: 5"),
    ],
)
def test_an_address_that_no_server_can_have_is_refused_where_it_is_given(
    tmp_path: Path, address: str
) -> None:
    """gRPC would ask another port, or nobody; the message names the file and the value."""
    path = tmp_path / "cluster.toml"
    path.write_text(f"[[server]]\naddress = {json.dumps(address)}\n")
    for refused in (lambda: ClusterToml(path).servers(), lambda: Client.connect(path)):
        with pytest.raises(ConfigError, match=re.escape(repr(address))) as caught:
            refused()
        assert caught.value.__notes__ == [f"in {path}"]
    with pytest.raises(ConfigError, match=re.escape(repr(address))):
        Client.connect(["127.0.0.1:50060", address])


@pytest.mark.parametrize("what", ["pipe", "large file"])
def test_what_is_no_list_of_servers_is_refused_unread(tmp_path: Path, what: str) -> None:
    """A pipe without a writer would be waited for, and a large file read for seconds."""
    path = tmp_path / "cluster.toml"
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("# it goes on\n" * MOST_BYTES)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        ClusterToml(path)


def saying(*servers: tuple[str, object]):
    """A `connect` to servers that say this of themselves, or fail with it."""
    said = dict(servers)

    def describe(address: str, shard_set: bytes) -> object:
        found = said[address]
        if isinstance(found, list):  # of several shard sets, the default first
            found = next(r for r in found if shard_set in (b"", getattr(r, "shard_set", None)))
        if isinstance(found, DlmError):
            raise found
        return found

    return lambda address: SimpleNamespace(
        describe=lambda timeout_s, shard_set=b"": describe(address, shard_set)
    )


def holding(*held: tuple[ModelFiles, int]) -> list[pb.DescribeReply]:
    """What a server says that holds a shard of each of several sets."""
    sets = [files.manifest.shard_set_bytes for files, _ in held]
    return [reply(files, shard, shard_sets=sets) for files, shard in held]


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
    """The faults name the other servers. Replicas do not count as more shards. If two sets have
    one shard each, the client keeps the set in use."""
    connect = saying(
        ("a:1", reply(other_files, 0)),
        ("a:2", reply(other_files, 0)),
        ("a:3", reply(other_files, 0)),
        ("b:1", reply(files, 1)),
        ("c:1", reply(files, 0)),
    )
    topology = discover(endpoints("a:1", "a:2", "a:3", "b:1", "c:1"), connect)
    assert topology.manifest.shard_set == files.manifest.shard_set
    assert topology.addresses == {0: ("c:1",), 1: ("b:1",)}
    assert other_files.manifest.shard_set in topology.faults["a:1"]
    for wanted in (files, other_files):
        shard_set = wanted.manifest.shard_set
        topology = discover(endpoints("a:1", "c:1"), connect, prefer=shard_set)
        assert topology.manifest.shard_set == shard_set


def test_a_silent_server_keeps_the_shard_that_is_said_of_it(files) -> None:
    """Behind those that answer for it; unless the set has no such shard."""
    connect = saying(
        ("a:1", ShardDown("gone")),
        ("b:1", reply(files, 1)),
        ("c:1", ShardDown("gone")),
        ("d:1", ShardDown("gone")),
    )
    listed = [Endpoint("a:1", 0), Endpoint("b:1", 1), Endpoint("c:1", 1), Endpoint("d:1", 99)]
    topology = discover(listed, connect)
    assert topology.addresses == {0: ("a:1",), 1: ("b:1", "c:1")}
    assert set(topology.faults) == {"a:1", "c:1", "d:1"}


def test_descriptions_that_cannot_be_used_are_typed_errors(files) -> None:
    """Nobody answers: ShardDown. Somebody does, but not with a manifest: ProtocolError."""
    with pytest.raises(ShardDown, match="a:1: gone"):
        discover(endpoints("a:1"), saying(("a:1", ShardDown("gone"))))
    junk = reply(files, 0)
    junk.manifest = junk.manifest[:-9]
    with pytest.raises(ProtocolError, match="a:1"):
        discover(endpoints("a:1"), saying(("a:1", junk)))
    topology = discover(endpoints("a:1", "b:1"), saying(("a:1", junk), ("b:1", reply(files, 2))))
    assert topology.addresses == {2: ("b:1",)}


def test_the_smallest_limit_of_the_servers_holds_for_all(files, other_files) -> None:
    """Of queries or of bytes; servers of another set and servers without limits do not count."""
    connect = saying(
        ("a:1", reply(files, 0, max_queries=500, max_message_bytes=1 << 22)),
        ("b:1", reply(files, 1, max_queries=300)),
        ("c:1", reply(files, 2)),
        ("d:1", reply(other_files, 0, max_queries=1)),
    )
    assert discover(endpoints("a:1", "b:1", "c:1", "d:1"), connect).max_queries == 300
    assert discover(endpoints("a:1"), connect).max_queries == 500
    assert discover(endpoints("c:1"), connect).max_queries == NO_LIMIT
    tiny = saying(("a:1", reply(files, 0, max_message_bytes=10)))
    assert discover(endpoints("a:1"), tiny).max_queries == 1


def test_a_model_is_chosen_by_the_beginning_of_its_id_or_of_its_shard_set(
    files, other_files
) -> None:
    """In small letters or large; without it, the one that all its servers name as their default."""
    connect = saying(
        ("a:1", holding((other_files, 0), (files, 0))),
        ("b:1", holding((other_files, 1), (files, 1))),
        ("c:1", reply(files, 2)),
    )
    listed = endpoints("a:1", "b:1", "c:1")
    for wanted in (files, other_files):
        for name in (wanted.manifest.model, wanted.manifest.shard_set):
            for model in (name, name[:6], name[:9].upper()):
                topology = discover(listed, connect, model=check_model(model))
                assert topology.manifest.shard_set == wanted.manifest.shard_set
    assert topology.addresses == {0: ("a:1",), 1: ("b:1",)}
    assert "shard set" in topology.faults["c:1"]
    topology = discover(listed, connect)
    assert topology.manifest.shard_set == other_files.manifest.shard_set
    named = saying(
        ("a:1", holding((files, 0), (other_files, 0))),
        ("b:1", holding((files, 1), (other_files, 1))),
        ("c:1", reply(files, 2)),
    )
    topology = discover(listed, named)
    assert topology.manifest.shard_set == files.manifest.shard_set
    assert topology.addresses == {0: ("a:1",), 1: ("b:1",), 2: ("c:1",)}
    assert topology.faults == {}


def test_among_sets_held_alike_the_default_of_the_servers_is_taken(files, other_files) -> None:
    """The one in use is left for it only where every shard of the default answers."""
    for first, second in ((files, other_files), (other_files, files)):
        connect = saying(
            ("a:1", holding((first, 0), (second, 0))), ("b:1", holding((first, 1), (second, 1)))
        )
        listed = endpoints("a:1", "b:1")
        assert discover(listed, connect).manifest.shard_set == first.manifest.shard_set
        kept = discover(listed, connect, prefer=second.manifest.shard_set)
        assert kept.manifest.shard_set == other_files.manifest.shard_set  # two shards, both there


def test_a_client_follows_the_default_only_once_all_servers_of_a_whole_set_agree(
    files, other_files
) -> None:
    """Server after server puts the new model first; one that is silent is no reason to go."""
    old, new = files, other_files
    listed = endpoints("a:1", "b:1", "c:1")
    only = ("c:1", reply(old, 2))  # which the new one, of two shards, does not need
    before = [holding((old, shard), (new, shard)) for shard in (0, 1)]
    after = [holding((new, shard), (old, shard)) for shard in (0, 1)]

    def chosen(*servers) -> str:
        given = {"prefer": old.manifest.shard_set}
        known = [Endpoint("a:1", 0), Endpoint("b:1", 1), Endpoint("c:1", 2)]
        return discover(known, saying(*servers), **given).manifest.shard_set

    assert chosen(("a:1", before[0]), ("b:1", before[1]), only) == old.manifest.shard_set
    assert chosen(("a:1", after[0]), ("b:1", before[1]), only) == old.manifest.shard_set
    assert chosen(("a:1", after[0]), ("b:1", ShardDown("")), only) == old.manifest.shard_set
    assert chosen(("a:1", after[0]), ("b:1", after[1]), only) == new.manifest.shard_set
    # Sets on servers of their own, each the default of its own: the one in use stays, whatever is
    # silent of it.
    alone = [("d:1", reply(new, 0)), ("e:1", reply(new, 1))]
    listed += endpoints("d:1", "e:1")
    known = [Endpoint("a:1", 0), Endpoint("b:1", 1), Endpoint("c:1", 2), *listed[3:]]
    servers = saying(("a:1", reply(old, 0)), ("b:1", ShardDown("")), only, *alone)
    found = discover(known, servers, prefer=old.manifest.shard_set)
    assert found.manifest.shard_set == old.manifest.shard_set
    assert found.addresses[1] == ("b:1",)


def test_the_model_that_the_operator_names_is_followed_when_all_its_shards_answer(
    files, other_files
) -> None:
    """Whatever the servers' default; a fresh client takes it at once; its own argument is first."""
    old, new = files, other_files
    connect = saying(
        ("a:1", holding((old, 0), (new, 0))),
        ("b:1", holding((old, 1), (new, 1))),
        ("c:1", reply(old, 2)),
    )
    listed = endpoints("a:1", "b:1", "c:1")
    name, in_use = new.manifest.model[:8], {"prefer": old.manifest.shard_set}

    def chosen(listed, **given) -> str:
        return discover(listed, connect, **given).manifest.shard_set

    assert chosen(listed, default=name, **in_use) == new.manifest.shard_set
    assert chosen(listed[:1], default=name, **in_use) == old.manifest.shard_set
    assert chosen(listed[:1], default=name) == new.manifest.shard_set
    assert chosen(listed, default=name, model=old.manifest.model) == old.manifest.shard_set
    assert chosen(listed, default="000000", **in_use) == old.manifest.shard_set
    with pytest.raises(ConfigError, match="model 000000"):
        chosen(listed, default="000000")


def test_shardings_of_one_model_are_no_choice_to_make(files) -> None:
    """While servers move from one to the other, the one of most shards is taken."""
    again = files.again(2)
    connect = saying(("a:1", holding((files, 0), (again, 0))), ("b:1", reply(again, 1)))
    topology = discover(endpoints("a:1", "b:1"), connect, model=files.manifest.model)
    assert topology.manifest.shard_set == again.manifest.shard_set


def test_a_model_that_nobody_holds_is_a_typed_error(files, other_files) -> None:
    """The message names what is held. While a server is silent it may be that one's."""
    listed = endpoints("a:1", "b:1")
    name = other_files.manifest.model
    connect = saying(("a:1", reply(files, 0)), ("b:1", reply(files, 1)))
    with pytest.raises(ConfigError, match=f"model {name}.*{files.manifest.model}"):
        discover(listed, connect, model=name)
    connect = saying(("a:1", reply(files, 0)), ("b:1", ShardDown("gone")))
    with pytest.raises(ShardDown, match=f"model {name}.*b:1: gone"):
        discover(listed, connect, model=name)


def test_a_beginning_that_several_models_share_is_refused(files, other_files) -> None:
    """The message names them. Ids that begin alike are rare, so one of these is made up."""
    theirs = other_files.manifest
    model = theirs.model
    made_up = reply(files, 0)
    connect = saying(("a:1", reply(other_files, 0)), ("b:1", made_up))
    census = Census()
    census.add(Endpoint("a:1"), reply(other_files, 0), 0)
    census.add(Endpoint("b:1"), made_up, 0)
    held = census.held[files.manifest.shard_set]
    held.manifest = dataclasses.replace(held.manifest, model=model[:8] + "0" * 24)
    with pytest.raises(ConfigError, match=f"several models.*{model[:8]}.*more digits"):
        census.choose(None, model[:8])
    assert census.choose(None, model[:9]).manifest is census.held[theirs.shard_set].manifest
    assert discover(endpoints("a:1", "b:1"), connect, model=model[:8]).manifest.model == model


@pytest.mark.parametrize("model", ["", "abcde", "0" * 33, "abcdeg", "abc def"])
def test_what_can_begin_no_id_is_refused(model) -> None:
    """Fewer than six digits would soon be ambiguous."""
    with pytest.raises(ConfigError, match="6 to 32 hex digits"):
        check_model(model)
    assert check_model(None) is None


@pytest.mark.parametrize("more", [1, 100_000])
def test_a_set_that_a_server_lists_but_does_not_describe_is_left_out(files, more: int) -> None:
    """The server stays for what it does describe, and the fault is told. Of a list without end it
    is asked for some, so that it cannot keep a client busy for ever."""
    listed = [files.manifest.shard_set_bytes, *(n.to_bytes(16, "big") for n in range(more))]
    asked: list[bytes] = []

    def describe(timeout_s: float, shard_set: bytes = b"") -> object:
        asked.append(shard_set)
        if shard_set:
            raise ShardDown("gone meanwhile")
        return reply(files, 0, shard_sets=listed)

    connect: Any = lambda address: SimpleNamespace(describe=describe)  # noqa: E731
    topology = discover(endpoints("a:1"), connect)
    assert topology.addresses == {0: ("a:1",)}
    assert topology.faults == {"a:1": "gone meanwhile"}
    assert len(asked) <= 1 + MAX_SHARD_SETS
