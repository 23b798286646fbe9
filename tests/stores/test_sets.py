"""Shard sets in a store: pushed, fetched, served, and rolled out to hosts that have but a URL."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import forked
from cluster import CommandServer, command, free_ports
from dlm.asr.kenlm import Model
from dlm.asr.open import open_model
from dlm.client import Client
from dlm.errors import ConfigError, FormatError, PrivacyError, ShardFormatError
from dlm.index.layout import MANIFEST, read_manifest
from dlm.index.making import build_shard_set
from dlm.index.placed import PUSHED, fetch_set, push_file, push_set
from dlm.record.provenance import Provenance
from dlm.record.signature import Claim, sign
from dlm.stores import fetching, remote
from dlm.stores.remote import located, put
from models import build, random_model

MODEL = random_model(seed=5, order=3, words=30, per_order=150)
SENTENCE = " ".join(words[0] for words in list(MODEL.ngrams)[3:8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a set of two shards."""
    return build(MODEL, tmp_path_factory.mktemp("set"), 2)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same words."""
    return build(MODEL, tmp_path_factory.mktemp("other"), 2, encoding="compact")


def test_a_set_is_pushed_once_and_fetched_as_it_was(
    bucket, folder, other, s3_address, monkeypatch
) -> None:
    """The same command again writes nothing, and a fetch needs no store; another set is refused."""
    place = located(f"{bucket}/en")
    assert push_set(folder, place)
    assert not push_set(folder, place)
    found = fetch_set(place)
    assert read_manifest(found).text == read_manifest(folder).text
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    remote.opened.cache_clear()
    assert fetch_set(place) == found  # the store is down
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_address)
    remote.opened.cache_clear()
    for entry in read_manifest(folder).files:
        assert (found / entry.name).read_bytes() == (folder / entry.name).read_bytes()
    with pytest.raises(ConfigError):
        push_set(other, place)


def test_a_push_that_is_killed_leaves_no_set_and_goes_on(bucket, folder, other) -> None:
    """At any moment: a set without its last file, the manifest, is none."""
    place, chance = located(f"{bucket}/en"), random.Random(3)
    program = (
        "import sys; from dlm.index.placed import push_set; from pathlib import Path;"
        "from dlm.stores.remote import located; push_set(Path(sys.argv[1]), located(sys.argv[2]))"
    )
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", program, str(folder), str(place)])
        time.sleep(chance.uniform(0.3, 0.8))
        process.kill()
        process.wait()
        try:
            assert fetch_set(place).is_dir()  # it was done before
        except ShardFormatError:
            with pytest.raises(ConfigError):
                open_model(str(place))
    push_set(folder, place)
    assert read_manifest(fetch_set(place)).text == read_manifest(folder).text


def test_of_two_pushes_at_once_the_second_is_refused_and_what_is_lost_is_pushed_again(
    bucket, folder, other
) -> None:
    """A set of files of two would fit no manifest."""
    import boto3

    place = located(f"{bucket}/en")
    put(place / PUSHED, read_manifest(other).shard_set.encode())  # it has begun
    with pytest.raises(ConfigError):
        push_set(folder, place)
    assert push_set(other, place)
    key = f"{place.key}/shard-0001.arrow"
    boto3.client("s3").delete_object(Bucket=place.root, Key=key)
    assert push_set(other, place)
    assert fetch_set(place).is_dir()


@pytest.mark.parametrize("fault", ["damaged", "missing", "another manifest"])
def test_a_set_whose_objects_are_not_its_own_is_refused(bucket, folder, other, fault) -> None:
    """And nothing of it is in the cache as if it were whole."""
    place = located(f"{bucket}/en")
    push_set(folder, place)
    data = (folder / "shard-0001.arrow").read_bytes()
    if fault == "damaged":
        put(place / "shard-0001.arrow", data[:-9] + b"\1" + data[-8:])
    elif fault == "missing":
        import boto3

        bucket_, key = place.root, f"{place.key}/shard-0001.arrow"
        boto3.client("s3").delete_object(Bucket=bucket_, Key=key)
    else:
        put(place / MANIFEST, (other / MANIFEST).read_bytes())
    with pytest.raises(FormatError):
        fetch_set(place)
    assert not list(fetching.home().rglob("shard-0001.arrow"))


def test_a_server_with_a_key_takes_only_what_it_signed(bucket, folder, tmp_path) -> None:
    """Of the files that it fetches; a set that nobody or somebody else signed is refused."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    arpa = MODEL.write(tmp_path / "model.arpa")
    arpa.write_text(f"# {Provenance.none('public text').line}\n\n{arpa.read_text()}")
    build_shard_set(arpa, tmp_path / "set", 2)
    keys = {}
    for name in ("mine", "theirs"):
        key = Ed25519PrivateKey.generate()
        keys[name] = tmp_path / f"{name}.pub"
        keys[name].write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        if name == "mine":
            push_set(tmp_path / "set", located(f"{bucket}/unsigned"))
            sign(Claim.of(tmp_path / "set" / MANIFEST), key, at=datetime.now(UTC))
            push_set(tmp_path / "set", located(f"{bucket}/signed"))
    with pytest.raises(ConfigError):
        fetch_set(located(f"{bucket}/unsigned"), [1], public_key=keys["mine"])
    assert push_set(tmp_path / "set", located(f"{bucket}/unsigned"))  # its signature alone
    for name in ("signed", "unsigned"):
        assert fetch_set(located(f"{bucket}/{name}"), [1], public_key=keys["mine"]).is_dir()
    with pytest.raises(PrivacyError):
        fetch_set(located(f"{bucket}/signed"), [1], public_key=keys["theirs"])


def test_every_name_of_a_model_takes_a_url(bucket, folder, kenlm_file) -> None:
    """A set, and a file of KenLM's."""
    push_set(folder, located(f"{bucket}/en"))
    push_file(kenlm_file, located(f"{bucket}/en.bin"))
    with Client.local(folder) as here:
        expected = here.utterance().score_sentences([SENTENCE])[0].log10_prob
    for opened in (open_model(f"{bucket}/en"), Client.local(f"{bucket}/en")):
        with opened as client:
            assert client.utterance().score_sentences([SENTENCE])[0].log10_prob == expected
    assert Model(f"{bucket}/en.bin").score(SENTENCE) == Model(str(kenlm_file)).score(SENTENCE)
    forked.run(command("fetch", f"{bucket}/en.bin", fetched := kenlm_file.with_name("fetched.bin")))
    assert fetched.read_bytes() == kenlm_file.read_bytes()


@pytest.fixture
def kenlm_file(folder: Path, tmp_path: Path) -> Path:
    """The model as a file of KenLM's."""
    made = tmp_path / "m.bin"
    done = forked.run(
        command("export", folder, "--format", "probing", "-o", made), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return made


def test_a_server_serves_its_shard_alone_and_from_the_cache_while_the_store_is_down(
    bucket, folder, other, tmp_path, monkeypatch
) -> None:
    """And says so."""
    push_set(folder, located(f"{bucket}/en"))
    env = {**os.environ, "DLM_CACHE_DIR": str(tmp_path / "host")}
    ready = tmp_path / "ready"
    arguments = ("serve", f"{bucket}/en", "--shard", 1, "--ready-file", ready)
    for address in (os.environ["AWS_ENDPOINT_URL"], "http://127.0.0.1:9"):
        env["AWS_ENDPOINT_URL"] = address
        with CommandServer(*arguments, ready_file=ready, cwd=tmp_path, env=env).ready() as server:
            said = server.errors
    assert "Going on with the copy" in said
    held = {one.name for one in (tmp_path / "host").rglob("*.arrow")}
    assert held == {"vocabulary.arrow", "low_orders.arrow", "shard-0001.arrow"}


@pytest.mark.slow
def test_hosts_with_a_url_alone_follow_a_roll_out_and_its_undo_under_load(
    bucket, folder, other, tmp_path
) -> None:
    """The commands of the page; the history names both."""
    old, new = f"{bucket}/old", f"{bucket}/new"
    push_set(folder, located(old))
    push_set(other, located(new))
    ports = free_ports(2)
    toml, sets = tmp_path / "cluster.toml", tmp_path / "cluster.sets"
    toml.write_text(
        "".join(
            f'[[server]]\naddress = "127.0.0.1:{port}"\nshard = {shard}\n\n'
            for shard, port in enumerate(ports)
        )
    )
    sets.write_text(f"{old}\n")
    for file in (toml, sets):
        push_file(file, located(f"{bucket}/{file.name}"))
    cluster = f"{bucket}/cluster.toml"
    servers = []
    try:
        for shard, port in enumerate(ports):
            ready = tmp_path / f"ready{shard}"
            env = {**os.environ, "DLM_CACHE_DIR": str(tmp_path / f"host{shard}")}
            line = ("serve", "--sets", f"{bucket}/cluster.sets", "--shard", shard, "--port", port)
            servers.append(
                CommandServer(*line, "--ready-file", ready, ready_file=ready, cwd=tmp_path, env=env)
            )
        for server in servers:
            server.ready()
        scores = set()
        for one in (folder, other):
            with Client.local(one) as client:
                scores.add(client.utterance().score_sentences([SENTENCE])[0].log10_prob)
        found, over = [], threading.Event()

        def ask() -> None:
            with Client.connect(cluster) as client:
                while not over.is_set():
                    found.append(client.utterance().score_sentences([SENTENCE])[0].log10_prob)
                    time.sleep(0.01)  # servers read new files on a core that has time

        thread = threading.Thread(target=ask)
        thread.start()
        quick = ("--watch-for", 1, "--idle", 2, "--longest", 20, "--cluster", cluster)
        where = ("--sets", f"{bucket}/cluster.sets")
        for what in (new, "--undo"):
            done = forked.run(
                command("rollout", what, *quick, *where), capture_output=True, env=dict(os.environ)
            )
            assert done.returncode == 0, done.stderr
        over.set()
        thread.join()
        assert set(found) == scores
        said = [told for told, _ in located(cluster).history()]
        assert sum("share 1" in one for one in said) == 2
        assert located(f"{bucket}/cluster.sets").read_text().splitlines()[0] == old
    finally:
        for server in servers:
            server.end()
