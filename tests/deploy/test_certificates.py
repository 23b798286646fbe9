"""The page's commands make certificates and tokens that servers and clients take."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster import WAIT_S, Cluster, CommandServer, build, command, until
from deploy.documents import texts
from dlm.client import Client, ClientConfig
from dlm.errors import UnavailableError
from models import random_model


def commands_of(section: str) -> list[str]:
    """The commands of a section, without what their comments say."""
    text = texts()["security.md"].split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\$ (.*?)(?:    #.*)?$", text, re.M)


@pytest.mark.promise("certificates")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")
def test_three_commands_make_certificates_that_are_served_and_trusted(tmp_path: Path) -> None:
    """With a server of ours, found by the name and by the address in its certificate; a client that
    trusts another authority does not connect."""
    commands = commands_of("Certificates")
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
        with pytest.raises(UnavailableError, match="authority in ca"):
            Client.connect([f"127.0.0.1:{port}"], stranger)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")
def test_tokens_are_tried_on_one_host_as_the_page_says(tmp_path: Path) -> None:
    """With a folder for the server and one for the client; no step gives a path but the page's. In
    the end the client is not let in any more."""
    *made, token, cluster, score, other, removal, again = commands_of("Try tokens on one host")
    files = build(random_model(5, order=3, words=30, per_order=60), tmp_path / "shards", 2)
    files.directory.rename(tmp_path / "shards/model")

    def run(line: str) -> None:
        if line.startswith("dlm "):
            line = shlex.join(command(*line.split()[1:]))
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, timeout=WAIT_S)
        assert done.returncode == 0, (line, done.stderr)

    def asks() -> subprocess.CompletedProcess[bytes]:
        _, arguments = score.split(" | dlm ")
        return subprocess.run(
            command(*arguments.split()), cwd=tmp_path, input=b"a b c\n", capture_output=True
        )

    for line in (*made, token):
        run(line)
    assert cluster.startswith("dlm cluster ")
    with CommandServer(
        *cluster.split()[1:], cwd=tmp_path, ready_file="client/cluster.toml"
    ).ready():
        done = asks()
        assert done.returncode == 0, done.stderr
        assert b"\t4\t" in done.stdout
        assert again == score
        run(other)
        run(removal)
        until(lambda: asks().returncode == 1)
