"""`dlm status` against a running cluster, and what it shows of rows."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
from dataclasses import fields

import pytest
from rich.console import Console

from cli.support import command
from dlm.cli.status import COLUMNS, cells_of, duration, shown, size
from dlm.client.status import Look, Row


def dead_address() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def test_a_cluster_is_told_as_a_table(run, cluster) -> None:
    """A line a server, the columns that the README names, and status 0."""
    done = run("status", "--interval", 0.05, cwd=cluster.parent)
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    for column in COLUMNS:
        assert column in out
    assert out.count(" ready ") == 2
    assert out.count("127.0.0.1:") == 2


def test_the_same_as_json(run, cluster) -> None:
    """Every documented key, and numbers that are numbers."""
    done = run("status", "--cluster", cluster, "--interval", 0.05, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert set(facts) == {"servers", "shards", "missing", "interval_s"}
    assert facts["shards"] == [0, 1]
    assert facts["missing"] == []
    for server in facts["servers"]:
        assert set(server) == {field.name for field in fields(Row)}
        assert server["state"] == "ready"
        assert server["queries_per_s"] == 0
        assert server["round_trip_ms"] > 0
        assert server["error"] is None


def test_a_dead_server_is_a_row_and_status_1(run, cluster, tmp_path) -> None:
    """With its error; the shard is named."""
    address = dead_address()
    text = cluster.read_text() + f'\n[[server]]\naddress = "{address}"\nshard = 2\n'
    (tmp_path / "cluster.toml").write_text(text)
    done = run("status", "--interval", 0.05, cwd=tmp_path)
    assert done.returncode == 1
    out = done.stdout.decode()
    assert f"{address}: {address} gave no answer" in out
    assert "shard 2: no server is ready" in out
    assert out.count(" ready ") == 2
    done = run("status", "--interval", 0.05, "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["missing"] == [2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "--watch"], "--json and --watch"),
        (["--interval", "0"], "--interval 0: seconds above 0"),
        (["--timeout", "-1"], "--timeout -1: seconds above 0"),
        (["--cluster", "nowhere.toml"], "nowhere.toml does not exist"),
    ],
)
def test_wrong_usage_is_told(run, cluster, arguments, said) -> None:
    """On standard error, with status 1."""
    done = run("status", *arguments, cwd=cluster.parent)
    assert done.returncode == 1
    assert said in done.stderr.decode()


def test_watching_ends_with_ctrl_c(cluster, environ) -> None:
    """The table is drawn anew on a terminal until the signal; status 0, no traceback."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        command("status", "--cluster", cluster, "--watch", "--interval", 0.05),
        env={**environ, "TERM": "xterm", "COLUMNS": "180"},
        stdout=child,
        stderr=subprocess.PIPE,
    )
    os.close(child)
    seen = b""
    while seen.count(b"round trip") < 3:
        seen += os.read(parent, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while part := os.read(parent, 65536):
            seen += part
    except OSError:
        pass  # what a terminal says when the other side has gone
    os.close(parent)
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, errors
    assert errors == b""
    assert b"ready" in seen


def test_what_is_not_known_is_left_empty() -> None:
    """A silent server has its address, its state and its error, and nothing invented."""
    row = Row("10.0.0.1:5", None, error="10.0.0.1:5 gave no answer")
    assert cells_of(row) == ["10.0.0.1:5", "?", "silent", *[""] * (len(COLUMNS) - 3)]
    full = Row(
        *("10.0.0.1:5", 3, "ready", 0, 4, "aa", "bb", 12345.6, 7.0, 1, 2, 99.6, 5 << 20, 61.0, 0.25)
    )
    assert cells_of(full)[1:] == [
        *("3", "ready", "1/4", "aa", "12,346", "7", "1", "2", "100", "5.0 MiB", "1 m 1 s", "0.2 ms")
    ]


def test_what_a_server_says_is_no_markup() -> None:
    """An error in brackets is shown as it is."""
    look = Look((Row("h:1", 0, error="[bold]x[/nothing]"),), (0,), (0,))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown(look))
    assert "h:1: [bold]x[/nothing]" in captured.get()


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 m 0 s"),
        (3_600, "1 h 0 m"),
        (18_605, "5 h 10 m"),
        (1_047_600, "12 d 3 h"),
    ],
)
def test_durations(seconds, told) -> None:
    """Two units at most."""
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("count", "told"),
    [(512 << 10, "512 KiB"), (1 << 20, "1.0 MiB"), (37_853_593, "36.1 MiB"), (2 << 30, "2.0 GiB")],
)
def test_sizes(count, told) -> None:
    """Binary units, named so."""
    assert size(count) == told
