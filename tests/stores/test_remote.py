"""Names of objects in stores, and small objects that are followed and replaced."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import pytest

from cluster import until
from dlm.errors import AuthenticationError, ConfigError, UnavailableError
from dlm.stores import remote
from dlm.stores.remote import RemotePath, located
from stores.servers import Files, stall


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://models/en/2026", ("s3", "models", "en/2026")),
        (Path("s3://models/en/"), ("s3", "models", "en")),
        ("https://host:8080/a.arpa", ("https", "host:8080", "a.arpa")),
        ("hf://org/name/a/b.bin", ("hf", "org/name@main", "a/b.bin")),
        ("hf://org/name@v2/b.bin", ("hf", "org/name@v2", "b.bin")),
        ("shards/model", None),
        ("dlm://host:1", None),
        ("/s3://x", None),
    ],
)
def test_a_url_names_an_object_and_anything_else_a_path(text, parts) -> None:
    """`Path` takes a slash away, which does not matter."""
    found = located(text)
    if parts is None:
        assert found == Path(text)
    else:
        assert (found.scheme, found.root, found.key) == parts
        assert located(found) is found
        assert pickle.loads(pickle.dumps(found)) == found == located(str(found))


@pytest.mark.parametrize(
    "text",
    [
        "s3://me:hidden@models/en",
        "https://host/a?X-Signature=hidden",
        "s3://models/../en",
        "hf://a",
    ],
)
def test_a_url_that_names_no_object_or_has_credentials_is_refused(text) -> None:
    """Those would stand in logs."""
    with pytest.raises(ConfigError) as caught:
        located(text)
    assert "hidden" not in str(caught.value)


def test_names_beside_and_below_an_object() -> None:
    """A whole path and another URL stay what they are."""
    place = located("s3://models/en/cluster.toml")
    assert str(place.parent / "x") == "s3://models/en/x"
    assert str(place.with_suffix(".sets")) == "s3://models/en/cluster.sets"
    assert place.parent / "/etc/token" == Path("/etc/token")
    assert str(place.parent / "gs://other/x") == "gs://other/x"


def test_a_change_is_written_only_over_what_was_read_and_each_stays(bucket) -> None:
    """So the second of two operators is told; the history has time, user and reason."""
    place = located(f"{bucket}/cluster.toml")
    assert place.replace(b"one", "dlm push")
    assert not located(str(place)).replace(b"other", "dlm push")
    mine, theirs = located(str(place)), located(str(place))
    assert mine.read_bytes() == theirs.read_bytes() == b"one"
    assert theirs.replace(b"two", "dlm rollout: share 0.5")
    assert not mine.replace(b"three", "dlm rollout")
    assert mine.read_bytes(fresh=True) == b"two"
    (first, one), (second, two) = place.history()
    assert (one, two) == (b"one", b"two")
    assert first.endswith("dlm push") and second.endswith("share 0.5") and "@" in second


def test_a_followed_object_changes_its_version_soon_and_keeps_it_while_the_store_fails(
    files: Files, monkeypatch
) -> None:
    """Nobody waits for a look; a store that is down changes nothing."""
    monkeypatch.setattr(remote, "RELOAD_S", 0.05)
    files.content["/a.toml"] = b"one"
    place = located(f"{files.address}/a.toml")
    assert place.read_bytes() == b"one"
    before = place.version()
    files.content["/a.toml"] = b"two"
    until(lambda: place.version() != before)
    assert place.read_bytes() == b"two"
    asked = len(files.asked)

    def refuse(handler) -> bool:
        files.send(handler, 500, b"")
        return True

    files.fault = refuse
    now = place.version()
    until(lambda: place.version() == now and len(files.asked) > asked + 2)
    assert place.read_bytes() == b"two"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, FileNotFoundError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (503, UnavailableError),
    ],
)
def test_what_a_store_refuses_is_an_error_that_names_the_object(
    files: Files, status, error
) -> None:
    """503 after it was asked again for a while."""

    def refuse(handler) -> bool:
        files.send(handler, status, b"")
        return True

    files.fault = refuse
    with pytest.raises(error, match=r"a\.toml"):
        located(f"{files.address}/a.toml").read_bytes()
    assert (len(files.asked) > 1) == (status == 503)


def test_a_store_that_stalls_is_an_error(files: Files, monkeypatch) -> None:
    """Once no byte has come for a while."""
    monkeypatch.setattr(remote, "STALL_S", 0.5)
    files.fault = stall
    with pytest.raises(UnavailableError, match=r"a\.toml"):
        located(f"{files.address}/a.toml").read_bytes()


def test_a_store_that_is_down_is_an_error(cache) -> None:
    """It was asked again for a while."""
    with pytest.raises(UnavailableError, match=r"gone\.toml"):
        located("http://127.0.0.1:9/gone.toml").read_bytes()


def test_a_forked_child_reads_too(files: Files) -> None:
    """The library's threads do not survive a fork."""
    files.content["/a.toml"] = b"one"
    place = located(f"{files.address}/a.toml")
    assert place.read_bytes() == b"one"
    files.content["/a.toml"] = b"two"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(place.read_bytes, (), {"fresh": True}) == b"two"


def test_a_file_is_not_written_over_http(files: Files) -> None:
    with pytest.raises(ConfigError):
        remote.put(RemotePath("http", files.address.removeprefix("http://"), "a"), b"")
