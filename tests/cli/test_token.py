"""`dlm token`, and servers and clients started with what it makes."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forked
from cli.conftest import Run
from cluster import WAIT_S, CommandServer, command
from dlm.cli.main import app
from dlm.client.cluster_file import ClusterToml
from dlm.server.tokens import MAX_TOKENS, read_tokens
from dlm.wire.secret import digest


def test_files_are_made_for_their_owner_alone_and_the_servers_grows(
    run: Run, tmp_path: Path
) -> None:
    """What stands in the server's file stays; the client's is never overwritten."""
    tokens = tmp_path / "tokens"
    for name in ("alice", "bob"):
        mine = ("--tokens", tokens, "--token-file", tmp_path / name)
        done = run("token", name, *mine, status=0)
        secret = (tmp_path / name).read_text().strip()
        assert secret.encode() not in done.stdout + done.stderr
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o600
    found = read_tokens(tokens)
    assert found.names == ("alice", "bob")
    assert found.digests[1] == digest((tmp_path / "bob").read_text().strip().encode())
    again = run("token", "bob", *mine)
    assert (again.returncode, b"exists" in again.stderr) == (1, True)
    assert read_tokens(tokens) == found


def test_tokens_that_are_made_at_once_are_all_added(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """By several programs to one file; nothing else is left beside it."""
    names = [f"decoder-{number}" for number in range(6)]
    line = ("--tokens", tmp_path / "tokens", "--token-file")
    made = [
        forked.Popen(command("token", name, *line, tmp_path / name), env=environ) for name in names
    ]
    assert [one.wait(WAIT_S) for one in made] == [0] * len(names)
    assert sorted(read_tokens(tmp_path / "tokens").names) == names
    assert sorted(one.name for one in tmp_path.iterdir()) == [*names, "tokens"]


def test_a_file_with_as_many_tokens_as_servers_take_is_not_extended(
    run: Run, tmp_path: Path
) -> None:
    """Servers would not start with one more."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    text = "".join(f"a:{number:064x}\n" for number in range(MAX_TOKENS))
    tokens.write_text(text)
    done = run("token", "b", "--tokens", tokens)
    assert (done.returncode, tokens.read_text()) == (1, text)
    assert str(MAX_TOKENS) in done.stderr.decode()


def test_a_full_disk_is_told_with_the_file_that_was_not_written(tmp_path: Path) -> None:
    """Of two: the client's fits below the limit, but not the servers', which stays as it was: then
    neither is written."""
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    mine_too = tmp_path / "mine-too"
    arguments = ("token", "bob", "--tokens", str(tokens), "--token-file")
    assert CliRunner().invoke(app, [*arguments, str(mine)]).exit_code == 0
    before = tokens.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1, hard))
    try:
        done = CliRunner().invoke(app, [*arguments, str(mine_too)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(done.exception, OSError)
    assert done.exception.filename == str(tokens)
    assert (tokens.read_bytes(), mine_too.exists()) == (before, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of root's is made by root alone")
def test_root_adds_a_token_to_the_file_that_its_servers_read_as_a_group(
    run: Run, tmp_path: Path
) -> None:
    """root:dlm with mode 640, as deploy/hosts.md makes it; owner, group and mode stay."""
    tokens = tmp_path / "tokens"
    assert run("token", "alice", "--tokens", tokens).returncode == 0
    os.chown(tokens, 0, 12345)
    tokens.chmod(0o640)
    run("token", "bob", "--tokens", tokens, status=0)
    found = tokens.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (0, 12345, 0o640)
    assert read_tokens(tokens).names == ("alice", "bob")


def test_a_token_may_end_and_name_models(run: Run, tmp_path: Path) -> None:
    """As the servers read it."""
    tokens = tmp_path / "tokens"
    more = ("--expires", "2100-01-31 12:00", "--models", "0123ABcd,4567cdef")
    assert run("token", "me", "--tokens", tokens, *more).returncode == 0
    found = read_tokens(tokens)
    assert found.models == (("0123abcd", "4567cdef"),)
    assert found.expires == (4105080000.0,)


@pytest.mark.parametrize("more", [("--models", "all"), ("--expires", "2001-01-31")])
def test_what_no_server_takes_is_refused(run: Run, tmp_path: Path, more: tuple[str, str]) -> None:
    """Nothing is written."""
    done = run("token", "me", "--tokens", tmp_path / "tokens", *more)
    assert (done.returncode, more[1].encode() in done.stderr) == (1, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "a b", "a:b", "-a", "é", "n" * 65])
def test_a_name_that_the_file_cannot_hold_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    """Nothing is written."""
    done = run("token", "--tokens", tmp_path / "tokens", "--", name)
    assert (done.returncode, b"expected 1 to 64 characters" in done.stderr) == (1, True)
    assert not list(tmp_path.iterdir())


def test_a_cluster_with_tokens_answers_who_has_one(
    run: Run, folder: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """`dlm cluster` writes for clients where their token is, and `dlm score` finds it there."""
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    assert run("token", "me", "--tokens", tokens, "--token-file", mine).returncode == 0
    path = tmp_path / "cluster.toml"
    options = ("--cluster", path, "--tokens", tokens, "--token-file", mine)
    line = ("cluster", folder / "shards", *options)
    with CommandServer(*line, cwd=tmp_path, env=environ).ready():
        assert ClusterToml(path).security().token_file == str(mine)
        text = b"a b c\n"
        scored = run("score", "--cluster", path, text=text, status=0)
        plain = run("score", "--local", folder / "shards", text=text)
        assert scored.stdout == plain.stdout
        other = tmp_path / "other"
        assert run("token", "you", "--token-file", other).returncode == 0
        refused = run("score", "--cluster", path, "--token-file", other, text=text, status=1)
        assert b"authorization: Bearer TOKEN" in refused.stderr
        looked = run("status", "--cluster", path, "--interval", 0.05)
        assert (looked.returncode, looked.stdout.count(b" ready ")) == (0, 2)
        looked = run("status", "--cluster", path, "--interval", 0.05, "--token-file", other)
        rows = [line for line in looked.stdout.decode().splitlines() if line.startswith("│")]
        assert (looked.returncode, sum(" refused " in row for row in rows)) == (1, 2)
        assert b"no server is ready" not in looked.stdout
        assert b"Traceback" not in refused.stderr
