"""The page's commands make certificates and tokens that servers and clients take."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster import WAIT_S, Cluster, CommandServer, build, command
from deploy.documents import texts
from dlm.client import Client, ClientConfig
from dlm.errors import UnavailableError
from models import random_model


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")
def test_three_commands_make_certificates_that_are_served_and_trusted(tmp_path: Path) -> None:
    """With a server of ours, found by the name and by the address in its certificate; a client that
    trusts another authority does not connect."""
    section = re.search(r"^## Certificates\n(.*?)^## ", texts()["README.md"], re.M | re.S)
    assert section
    commands = re.findall(r"^\$ (.*)$", section[1], re.M)
    assert len(commands) == 3
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir()
        for line in commands:
            here = line.replace("HOST", "localhost").replace("10.0.0.12", "127.0.0.1")
            done = subprocess.run(
                here, shell=True, cwd=tmp_path / folder, capture_output=True, timeout=WAIT_S
            )
            assert done.returncode == 0, (here, done.stderr)
    made = tmp_path / "ours"
    assert (made / "server.key").stat().st_mode & 0o077 == 0
    files = build(random_model(5, order=3, words=30, per_order=60), tmp_path / "model", 1)
    tls = {"tls_cert": str(made / "server.crt"), "tls_key": str(made / "server.key")}
    with Cluster(files, **tls) as cluster:
        port = cluster.ports[0]
        for address in (f"127.0.0.1:{port}", f"localhost:{port}"):
            config = ClientConfig(cache_dir=tmp_path / "cache", ca=str(made / "ca.crt"))
            with Client.connect([address], config) as client:
                [score] = client.utterance().score_sentences(["a b c"])
                assert score.tokens == 4
        stranger = ClientConfig(cache_dir=tmp_path / "cache", ca=str(tmp_path / "theirs/ca.crt"))
        with pytest.raises(UnavailableError, match="authority in ca does not vouch"):
            Client.connect([f"127.0.0.1:{port}"], stranger)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")
def test_tokens_are_tried_on_one_host_as_the_page_says(tmp_path: Path) -> None:
    """With a folder for the server and one for the client; no step gives a path but the page's."""
    section = re.search(r"^## Authentication\n(.*?)^\| to ", texts()["README.md"], re.M | re.S)
    assert section
    *made, token, cluster, score = re.findall(r"^\$ (.*?)(?:    #.*)?$", section[1], re.M)
    files = build(random_model(5, order=3, words=30, per_order=60), tmp_path / "shards", 2)
    files.directory.rename(tmp_path / "shards/model")
    for line in made:
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, timeout=WAIT_S)
        assert done.returncode == 0, (line, done.stderr)
    done = subprocess.run(
        command(*token.split()[1:]), cwd=tmp_path, capture_output=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert cluster.startswith("dlm cluster ")
    with CommandServer(
        *cluster.split()[1:], cwd=tmp_path, ready_file="client/cluster.toml"
    ).ready():
        _, arguments = score.split(" | dlm ")
        done = subprocess.run(
            command(*arguments.split()), cwd=tmp_path, input=b"a b c\n", capture_output=True
        )
    assert done.returncode == 0, done.stderr
    assert b"\t4\t" in done.stdout
