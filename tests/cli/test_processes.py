"""Clusters on this machine: started whole, stopped whole."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import forked
from certificates import Authority
from cli.conftest import Run
from cluster import WAIT_S, CommandServer, command, free_ports, gone, until
from dlm.client.cluster_file import (
    ClusterToml,
    Endpoint,
    Rollout,
    edit,
    edited,
    replace_servers,
    write_cluster_file,
)
from dlm.cluster import processes
from dlm.errors import ConfigError
from dlm.files import Replacement


def _wait_gone(pids: list[int]) -> None:
    until(lambda: all(map(gone, pids)))


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


@pytest.mark.promise("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_stops_every_server_and_removes_the_file(
    folder: Path, tmp_path: Path, environ: dict[str, str], number: signal.Signals
) -> None:
    """Exit status 0, no server left, no cluster.toml that names nothing; as if it closed."""
    with CommandServer("cluster", folder / "shards", cwd=tmp_path, env=environ).ready() as process:
        servers = process.children()
        assert len(servers) == 2
        assert process.stop(number) == 0
        _wait_gone(servers)
    assert not (tmp_path / "cluster.toml").exists()


def test_a_server_drains_if_its_terminal_closes(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """As after SIGTERM, whatever it was started from."""
    arguments = ("serve", folder / "shards", "--shard", 0, "--ready-file", "ready.json")
    started = CommandServer(*arguments, cwd=tmp_path, env=environ, ready_file="ready.json")
    with started.ready() as process:
        assert process.stop(signal.SIGHUP) == 0
        assert json.loads(process.errors.splitlines()[-1])["event"] == "server.stopped"


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_the_others_running(
    folder: Path, run: Run, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The line that is printed starts it again; the last one that ends ends the command, and the
    file stays for the one that was started by hand."""
    with CommandServer("cluster", folder / "shards", cwd=tmp_path, env=environ).ready() as process:
        until(lambda: "Ctrl-C stops the servers and removes it" in process.printed)
        first, second = process.children()
        os.kill(second, signal.SIGKILL)
        until(lambda: "To start it again: dlm serve " in process.errors)
        said = process.errors.splitlines()[-1]
        assert re.match(r"the server of shard 1 at \S+ was killed \(SIGKILL\); its shard has", said)
        status = run("status", "--json", cwd=tmp_path, status=1)
        facts = json.loads(status.stdout)
        assert facts["missing"] == [1]
        assert [row["state"] for row in facts["servers"]] == ["ready", "silent"]
        words = said.partition("To start it again: dlm ")[2].partition(" (or")[0].split()
        by_hand = ("--ready-file", tmp_path / "again.json")
        with CommandServer(
            *words, *by_hand, cwd=tmp_path, env=environ, ready_file="again.json"
        ).ready():
            assert run("status", cwd=tmp_path).returncode == 0
            os.kill(first, signal.SIGKILL)
            assert process.wait() == 1
            assert "was killed (SIGKILL); every server that this command" in process.errors
            assert re.search(r"kept cluster\.toml: 127\.0\.0\.1:\d+ still listens", process.errors)
            assert (tmp_path / "cluster.toml").exists()


def test_a_second_cluster_does_not_take_the_file_of_the_first(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Refused while the first runs; the file of one that was killed is replaced."""
    with CommandServer("cluster", folder / "shards", cwd=tmp_path, env=environ).ready() as process:
        written = (tmp_path / "cluster.toml").read_bytes()
        second = forked.run(
            command("cluster", folder / "shards"),
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            timeout=WAIT_S,
        )
        assert second.returncode == 1
        assert b"another dlm cluster is writing cluster.toml" in second.stderr
        assert (tmp_path / "cluster.toml").read_bytes() == written
        servers = process.children()
        process.kill()
    _wait_gone(servers)
    assert (tmp_path / "cluster.toml").exists()
    with CommandServer("cluster", folder / "shards", cwd=tmp_path, env=environ).ready():
        assert (tmp_path / "cluster.toml").read_bytes() != written


def test_of_two_clusters_started_at_once_one_is_refused(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The file is not written yet when the second one looks."""
    line = ("cluster", folder / "shards")
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(CommandServer(*line, cwd=tmp_path, env=environ)) for _ in range(2)
        ]

        def settled() -> bool:
            done = [one.process.poll() is not None or "wrote" in one.printed for one in both]
            return all(done)

        until(settled)
        (refused,) = (one for one in both if "wrote" not in one.printed)
        assert refused.wait() == 1
        assert "another dlm cluster is writing cluster.toml" in refused.errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_lies_in_the_current_folder_is_not_part_of_the_servers(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """A queue.py of the user's, and a folder dlm/: Python would import them in place of its own."""
    trap = "import os; open(os.path.join(os.path.dirname(__file__), 'imported'), 'w')"
    (tmp_path / "queue.py").write_text(trap)
    (tmp_path / "dlm").mkdir()
    (tmp_path / "dlm/__init__.py").write_text(trap)
    # As the script `dlm`, whose own folder is in place of the current one.
    line = ("cluster", folder / "shards")
    with CommandServer(*line, cwd=tmp_path, env=environ, python=["-P"]).ready():
        pass
    assert not list(tmp_path.rglob("imported"))


# `dlm`, which gets SIGTERM in the middle of waiting, once it has written cluster.toml.
INTERRUPTED = """
import os, signal, threading, time

sent = []

def interrupted(wait):
    def waits(*arguments):
        here = threading.current_thread() is threading.main_thread()
        if here and not sent and os.path.exists("cluster.toml"):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(*arguments)
    return waits

threading.Condition.wait = interrupted(threading.Condition.wait)
time.sleep = interrupted(time.sleep)
from dlm.cli.main import main
main()
"""


@pytest.mark.slow
def test_a_cluster_that_is_stopped_while_it_begins_to_wait_ends(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The handler takes no lock that the thread it interrupts may hold."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "cluster", str(folder / "shards")],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "stopped")


def test_a_port_that_is_taken_is_told(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The command fails with the server's own message, and stops the other server."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = forked.run(
            command("cluster", folder / "shards", "--port", min(port, 65_000)),
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            timeout=WAIT_S,
        )
    if port <= 65_000:
        assert done.returncode == 1
        assert str(port).encode() in done.stderr
    assert not (tmp_path / "cluster.toml").exists()


def two_free_ports() -> int:
    """The first of two ports side by side on which nobody listens, and that no connection is given
    before they are used."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError):
            for one in (port, port + 1):
                socket.create_server(("127.0.0.1", one)).close()
            return port


@pytest.mark.promise("metrics_listed")
def test_metrics_of_shards_are_on_ports_side_by_side(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Shard 0 on the port that is given, the next one on the port after it."""
    first = two_free_ports()
    line = ("cluster", folder / "shards", "--metrics-port", first)
    with CommandServer(*line, cwd=tmp_path, env=environ).ready():
        for shard in (0, 1):
            address = f"http://127.0.0.1:{first + shard}/metrics"
            with urllib.request.urlopen(address, timeout=WAIT_S) as reply:
                text = reply.read().decode()
            assert set(re.findall(r'shard="(\d+)"', text)) == {str(shard)}


@pytest.mark.promise("exact")
@pytest.mark.slow  # the README's first command is the same, without --kill
def test_the_demo_ends_with_every_score_equal(tmp_path: Path, environ: dict[str, str]) -> None:
    """The main job, on the model that comes with the package, with text of one's own, while a
    server is killed."""
    text = tmp_path / "text.txt"
    text.write_text("the man went to the house\nthere was no xyzzy in it\n")
    done = subprocess.run(
        command("demo", "--shards", 2, "--text", text, "--kill"),
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rb"All [\d,]+ scores equal the ARPA model's, bit for bit", done.stdout)
    assert b"killed a server" in done.stdout
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.slow
def test_the_demo_ends_at_the_page_of_a_gateway(tmp_path: Path, environ: dict[str, str]) -> None:
    """In the user's browser, until Ctrl-C; then it prints what it checked."""
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\necho "$1" > opened\n')
    browser.chmod(0o700)
    more = {**environ, "BROWSER": f"{browser} %s"}
    line = ("demo", "--open", "--shards", 1)
    with CommandServer(*line, cwd=tmp_path, env=more, ready_file="opened").ready() as process:
        until(lambda: (tmp_path / "opened").read_text().endswith("\n"))
        url = (tmp_path / "opened").read_text().strip()
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            assert "<h1>dlm gateway</h1>" in reply.read().decode()
        servers = process.children()
        assert len(servers) == 2
        assert process.stop(signal.SIGINT) == 0
        assert "scores equal the ARPA model's, bit for bit" in process.printed
        _wait_gone(servers)


@pytest.mark.slow
def test_a_cluster_of_two_models_answers_as_each(
    folder: Path, other: Path, run: Run, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Two shards of one and three of the other, two processes a server: six processes. Without
    --model the one that all who hold it name first is asked."""
    line = ("cluster", folder / "shards", other, "--processes", 2)
    with CommandServer(*line, cwd=tmp_path, env=environ).ready() as process:
        servers = process.children()
        assert len(servers) == 6
        text = b"a b c d\nd a b\n"
        for shards, more in ((folder / "shards", True), (other, True), (folder / "shards", False)):
            model = json.loads(run("info", shards, "--json").stdout)["model"]
            chosen = ["--model", model[:8]] if more else []
            served = run("score", *chosen, cwd=tmp_path, text=text)
            local = run("score", "--local", shards, text=text)
            assert served.returncode == local.returncode == 0, served.stderr + local.stderr
            assert served.stdout == local.stdout
        unknown = run("score", "--model", "0" * 8, cwd=tmp_path, status=1)
        assert b"no server holds model 00000000" in unknown.stderr
        assert process.stop() == 0
        assert process.printed.count("shard set") == 2
    _wait_gone(servers)


@pytest.mark.slow
def test_a_cluster_of_replicas_outlives_one_of_each_shard(
    folder: Path, run: Run, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Two servers of each of two shards; scores are the same with all, and without one of each."""
    line = ("cluster", folder / "shards", "--replicas", 2)
    with CommandServer(*line, cwd=tmp_path, env=environ).ready() as process:
        servers = process.children()
        assert len(servers) == 4
        assert (tmp_path / "cluster.toml").read_text().count("shard = 1") == 2
        text = b"a b c d\nd a b\n"
        local = run("score", "--local", folder / "shards", text=text)
        for killed in (None, servers[0], servers[3]):
            if killed is not None:
                os.kill(killed, signal.SIGKILL)
                _wait_gone([killed])
            served = run("score", cwd=tmp_path, text=text)
            assert (served.returncode, served.stdout) == (0, local.stdout), served.stderr
        os.kill(servers[2], signal.SIGKILL)
        until(lambda: process.errors.count("was killed (SIGKILL)") == 3)
        assert process.errors.count("its shard has 1 other server left") == 2
        assert process.errors.count("its shard has no server left") == 1
        assert process.process.poll() is None


def test_a_restart_is_written_though_a_server_was_added_by_hand(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The file has the new process, and still the other server."""
    listed = tmp_path / "cluster.toml"
    line = ("cluster", folder / "shards", "--restart")
    with CommandServer(*line, cwd=tmp_path, env=environ).ready() as process:
        added = Endpoint("127.0.0.1:9", 1)
        replace_servers(listed, lambda now: [*now, added])
        killed = next(one.pid for one in ClusterToml(listed).servers() if one.shard == 0)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: "restarted" in process.errors)
        servers = ClusterToml(listed).servers()
        host, port = servers[0].address.split(":")
        until(lambda: _answers(host, int(port)))
        assert process.errors.count("restarted") == 1  # its port was free
        assert servers[-1] == added
        assert {one.pid for one in servers[:-1]} == set(process.children())


OURS, OTHER = Endpoint("127.0.0.1:7", 0, 11), Endpoint("10.0.0.1:7", 0, 11)
SERVER = processes.Server(cast(Any, SimpleNamespace(pid=12)), replace(OURS, pid=12), ())
ROLLOUT = Rollout(model="b" * 8, replaces="a" * 8, share=0.5)
WRITERS = {
    "process ids": lambda path: processes.write_pids(path, [SERVER]),
    "roll-out": lambda path: edit(path, lambda toml: edited(toml.text, "a" * 8, ROLLOUT)),
}


@pytest.mark.parametrize("half", ["", "[[server]]\n"])
@pytest.mark.parametrize("writer", WRITERS)
def test_an_edit_that_comes_while_cluster_toml_is_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, half: str
) -> None:
    """As if it came before, of a program that knows no lock; half a file is left to its writer."""
    listed, after, sync = tmp_path / "cluster.toml", tmp_path / "after.toml", Replacement.sync
    write_cluster_file(listed, [OURS])
    write_cluster_file(after, [OURS, OTHER])
    text = after.read_text() + half
    after.write_text(text)

    def edited_meanwhile(replacement: Replacement) -> None:
        monkeypatch.undo()
        sync(replacement)
        listed.write_text(text)

    for path in (after, listed):
        with contextlib.suppress(ConfigError):
            WRITERS[writer](path)
        monkeypatch.setattr(Replacement, "sync", edited_meanwhile)
    assert listed.read_text() == after.read_text()
    assert (after.read_text() == text) == bool(half)
    assert {*tmp_path.iterdir()} == {listed, after}


def test_a_server_that_cluster_toml_no_longer_lists_is_retired_when_it_is_stopped(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Until it is listed again; the others are restarted, also those that the file calls
    `localhost`. The command ends with the last, and says why."""
    listed = tmp_path / "cluster.toml"
    line = ("cluster", folder / "shards", "--replicas", 2, "--restart")
    with CommandServer(*line, cwd=tmp_path, env=environ).ready() as process:
        first, second, *others = ClusterToml(listed).servers()
        named = replace(second, address=second.address.replace("127.0.0.1", "localhost"))
        replace_servers(listed, lambda _: [named, *others])
        for one in (first, second):
            assert one.pid is not None
            os.kill(one.pid, signal.SIGTERM)
        until(lambda: "restarted" in process.errors and "retired" in process.errors)
        assert re.search(rf"at {first.address} ended with status 0; it is retired", process.errors)
        until(lambda: len(process.children()) == 3)
        renewed = ClusterToml(listed).servers()[0]
        assert renewed.address == named.address and renewed.pid in process.children()
        replace_servers(listed, lambda now: [first, *now])
        until(lambda: process.errors.count("restarted") == 2)
        replace_servers(listed, lambda _: [Endpoint(f"192.0.2.1:{9 + at}", at) for at in (0, 1)])
        for pid in process.children():
            os.kill(pid, signal.SIGTERM)
        assert process.wait() == 1
        said = "it is retired, since the cluster file does not list it; every server that this"
        assert f"{said} command started has exited. Start the cluster again" in process.errors
    assert not listed.exists()


def test_a_cluster_tells_what_starts_a_server_of_a_shard_that_is_new(
    folder: Path, run: Run, tmp_path: Path, environ: dict[str, str]
) -> None:
    """With its own flags and free ports, once; the command is good as it stands."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"alice:{'a' * 32}\n")
    (port,) = free_ports(1)
    line = ("cluster", folder / "shards", "--tokens", tokens, "--metrics-port", port)
    with CommandServer(*line, cwd=tmp_path, env=environ).ready() as process:
        run("reshard", folder / "shards", "--shards", 3, "-o", tmp_path / "three", status=0)
        with (tmp_path / "cluster.sets").open("a") as sets:
            sets.write(f"{tmp_path / 'three'}\n")
        until(lambda: "shard 2, of which no server runs" in process.errors)
        (said,) = re.findall(r"To start one: dlm (.*); then add (\S+) to", process.errors)
        words = said[0].split()
        assert words[words.index("--tokens") + 1] == str(tokens)
        assert int(words[words.index("--metrics-port") + 1]) not in (0, port, port + 1)
        ready = tmp_path / "two.json"
        with CommandServer(
            *words, "--ready-file", ready, cwd=tmp_path, env=environ, ready_file=ready
        ).ready():
            found = json.loads(ready.read_text())
            assert (found["shard"], said[1]) == (2, f"127.0.0.1:{found['port']}")


@pytest.mark.parametrize("trouble", ["port", "fork"])
def test_a_server_that_cannot_be_restarted_yet_is_named_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: str
) -> None:
    """Another process has its port, or the system has no room: an operator knows that it is down,
    and the others are watched."""
    monkeypatch.setattr(processes, "HELD_S", 0)
    monkeypatch.setattr(processes, "RESTART_S", 0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    looks = iter(range(3))
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        if trouble == "fork":
            other.close()
            monkeypatch.setattr(sys, "executable", str(tmp_path))  # which the system cannot start
        server = processes.Server(ended, Endpoint(address, 0), ["--port", "0"])
        lines = list(
            processes.supervise(
                [server],
                lambda: next(looks, None) is None,
                restart=True,
                sets=tmp_path / "sets",
                is_listed=lambda _: True,
                changed=lambda _: None,
            )
        )
    assert len(lines) == (1 if trouble == "port" else 3)  # the port is named once
    assert all(address in line for line in lines)


@pytest.mark.promise("ctrl_c")
def test_no_server_outlives_a_cluster_that_was_killed(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """kill -9 on the command still ends the servers, and the processes that they have."""
    line = ("cluster", folder / "shards", "--processes", 2)
    with CommandServer(*line, cwd=tmp_path, env=environ).ready() as process:
        servers = process.children()
        assert len(servers) == 4
        process.kill()
    _wait_gone(servers)


def test_a_servers_log_is_json_and_nothing_else(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """gRPC has a line of its own for a stranger who speaks no TLS: it is not there. Every event has
    the time in UTC, the shard and, when it is bound, the address."""
    pair = Authority(tmp_path).server
    process = CommandServer(
        *("serve", folder / "shards", "--shard", 1, "--ready-file", "ready"),
        *("--tls-cert", pair.cert, "--tls-key", pair.key),
        cwd=tmp_path,
        env={k: v for k, v in environ.items() if not k.startswith("GRPC_")},
        ready_file="ready",
    ).ready()
    with process:
        port = json.loads((tmp_path / "ready").read_text())["port"]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
            while stranger.recv(4096):
                pass
        assert process.stop() == 0
        events = [json.loads(line) for line in process.errors.splitlines()]
    names = {event["event"] for event in events}
    assert names >= {"server.opened", "server.ready", "server.state", "server.stopped"}
    for event in events:
        assert event["shard"] == 1
        if event["event"] in ("server.ready", "server.state"):
            assert event["from_state"] != event["to_state"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", event["time"])
    (drained,) = (event for event in events if event["event"] == "server.drained")
    assert drained["state"] == "DRAINING" and "to_state" not in drained
    ready = next(event for event in events if event["event"] == "server.ready")
    assert ready["address"] == f"127.0.0.1:{port}"
    told = datetime.fromisoformat(ready["time"])
    assert abs((datetime.now(UTC) - told).total_seconds()) < 600


def test_tokens_that_cannot_be_read_are_refused_before_a_shard_is_opened(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """The log has no event that reads as if the server listened already."""
    line = ("serve", folder / "shards", "--shard", 0, "--port", 50063)
    done = run(*line, "--tokens", tmp_path / "nowhere", status=1)
    assert b"nowhere does not exist; `dlm token NAME --tokens " in done.stderr
    assert b"server.opened" not in done.stderr


def test_a_small_model_that_is_damaged_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, run: Run
) -> None:
    """Not found out when it is needed."""
    for wrong in (tmp_path / "absent", tmp_path):
        done = run("cluster", folder / "shards", "--local-fallback", wrong, cwd=tmp_path, status=1)
        assert b"manifest.json" in done.stderr
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in (folder / "shards").iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "shard-0001.arrow":
            data[len(data) // 2] ^= 1
        (damaged / path.name).write_bytes(data)
    done = run("cluster", folder / "shards", "--local-fallback", damaged, cwd=tmp_path, status=1)
    assert b"shard-0001.arrow" in done.stderr
