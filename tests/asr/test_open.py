"""One name for every place a model may be."""

from __future__ import annotations

import gzip
import multiprocessing
import os
from pathlib import Path

import pytest

from cluster import Cluster, ModelFiles, build
from dlm.asr.open import CLUSTER, SERVERS, SHARD_SET, ModelSource, find_source, open_model, sharded
from dlm.client import Client, ClientConfig
from dlm.errors import ConfigError, DlmError, FormatError
from models import HAND_MADE, random_model

MODEL = random_model(3, order=3, words=20, per_order=80)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model and its shard set."""
    return build(MODEL, tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def asked(client: Client) -> list[float]:
    """What a client says of some sentences."""
    sentences = ["w1 w2 w3", "w4", "", "unknown w1 w19 w3 w2"]
    return [s.log10_prob for s in client.utterance().score_sentences(sentences)]


def test_a_shard_set_an_arpa_file_and_a_cluster_say_the_same(
    files: ModelFiles, tmp_path: Path, cache: Path
) -> None:
    """By their paths, as str, bytes or Path, and by pointers to each."""
    arpa = files.directory.with_name("model.arpa")
    packed = tmp_path / "model.arpa.gz"
    packed.write_bytes(gzip.compress(arpa.read_bytes()))
    config = ClientConfig(deadline_s=60)
    with Client.local(files.directory) as client:
        expected = asked(client)
    with Cluster(files) as running:
        cluster = running.write(tmp_path / "cluster.toml")
        addresses = ",".join(running.addresses)
        named: list[str | bytes | Path] = [
            files.directory, os.fsencode(arpa), str(packed), cluster, f"dlm://{addresses}",
            f"dlm://{addresses}?model={files.manifest.model[:6]}", f"dlm://{cluster}",
        ]  # fmt: skip
        pointer = tmp_path / "remote.bin"
        for place in (str(cluster), "./cluster.toml", addresses, str(arpa), "./model.arpa.gz"):
            pointer.write_text(f"dlm://{place}\n")
            with open_model(pointer, config=config) as client:
                assert asked(client) == expected, place
        for name in named:
            with open_model(name, config=config) as client:
                assert asked(client) == expected, name
    assert len(list((cache / "models").iterdir())) == 2


def test_an_arpa_file_is_sharded_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path
) -> None:
    """One shard set for each path."""
    arpa = MODEL.write(tmp_path / "model.arpa")
    said: list[str] = []
    folder = sharded(arpa, tell=said.append)
    assert any("sharding" in line for line in said)
    said.clear()
    assert sharded(arpa, tell=said.append) == folder
    assert not said
    with open_model(arpa) as client:
        before = asked(client)
        random_model(4, order=3, words=20, per_order=80).write(arpa)
        with open_model(arpa) as fresh:
            assert asked(fresh) != before
        assert asked(client) == before  # its files are mapped
    assert [p.name for p in (cache / "models").iterdir()] == [sharded(arpa).name]
    assert sharded(arpa) != folder


def _open_in_child(arpa: Path, ready: object, results: object) -> None:
    ready.wait()  # type: ignore[attr-defined]
    said: list[str] = []
    with open_model(arpa, tell=said.append) as client:
        results.put((asked(client), any(line.startswith("sharding") for line in said)))  # type: ignore[attr-defined]


def test_of_processes_that_open_one_file_at_the_same_time_one_shards_it(tmp_path: Path) -> None:
    """The others wait for it."""
    arpa = MODEL.write(tmp_path / "model.arpa")
    context = multiprocessing.get_context("fork")
    ready, results = context.Barrier(2), context.Queue()
    children = [
        context.Process(target=_open_in_child, args=(arpa, ready, results)) for _ in range(2)
    ]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join()
    assert found[0][0] == found[1][0]
    assert sorted(sharded_here for _, sharded_here in found) == [False, True]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"dlm://a:1\ndlm://b:2\n", "2 lines"),
        (b"dlm://", "dlm://HOST:PORT"),
        (b"dlm://nowhere", "nowhere.*port"),
        (b"dlm://a:1?model=xyz", "6 hex digits"),
        (b"dlm:///nothing/there", "/nothing/there"),
        (b"dlm://./model.bin", "model.bin.*pointer"),
        (b"mmap lm http://kheafield.com/code format version 5\n\0", "ends after"),
        (b"the cat sat\n", "data"),
        (b"\\data\\\nngram 1=5\n\n\\1-grams:\n-1\ta\n", "1-grams"),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_what_it_is(
    tmp_path: Path, cache: Path, content: bytes, expected: str
) -> None:
    """And nothing is left in the cache."""
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises((ConfigError, FormatError), match=expected):
        open_model(path)
    assert not cache.exists() or list((cache / "models").iterdir()) == []


def test_what_is_not_there_empty_or_of_a_wrong_kind_is_refused(tmp_path: Path) -> None:
    """With the type of error that says so, and what is expected."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, message in [
        ("nothing", "no such"), ("empty", "empty"), ("folder", "manifest"),
        ("pipe", "regular file"), ("none.toml", "no such"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=rf"{name}\b.*{message}|{message}.*{name}\b"):
            open_model(tmp_path / name)
    with pytest.raises(ConfigError, match="empty string"):
        open_model("")
    with pytest.raises(ConfigError, match="name is None"):
        open_model(None)  # type: ignore[arg-type]
    (tmp_path / "bad.toml").write_text("servers = 3\n")
    with pytest.raises(DlmError):
        open_model(tmp_path / "bad.toml")
    arpa = HAND_MADE["weight_without_continuation"].write(tmp_path / "model.arpa")
    with pytest.raises(ConfigError, match="'abcdef'"):
        open_model(arpa, model="abcdef")


def test_a_source_says_what_a_name_leads_to(files: ModelFiles, tmp_path: Path) -> None:
    """Without opening it."""
    (tmp_path / "c.toml").write_text("x")
    assert find_source(files.directory) == ModelSource(SHARD_SET, files.directory)
    assert find_source(tmp_path / "c.toml").kind == CLUSTER
    assert find_source("dlm://a:1,b:2") == ModelSource(SERVERS, addresses=("a:1", "b:2"))


def test_a_cache_that_cannot_be_written_says_where_to_name_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands in its place."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="DLM_CACHE_DIR"):
        open_model(MODEL.write(tmp_path / "model.arpa"))
