"""`dlm status` against a running cluster, and what it shows of rows."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from rich.console import Console

import forked
from certificates import Authority
from cluster import WAIT_S, Cluster, build, command
from connect_proxy import VARIABLES
from dlm.cli.status import COLUMNS, cells_of, duration, problems, ready, render
from dlm.cluster.status import ClusterSnapshot, Row
from models import random_model


def dead_address() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def test_a_cluster_is_told_as_a_table(run, cluster) -> None:
    """A line a server, the columns that the README names, and status 0."""
    done = run("status", "--interval", 0.05, cwd=cluster.parent, status=0)
    out = done.stdout.decode()
    for column in COLUMNS:
        assert column in out
    assert out.count(" ready ") == 2
    assert out.count("127.0.0.1:") == 2


def test_the_same_as_json(run, cluster) -> None:
    """Every documented key, and numbers that are numbers."""
    done = run("status", "--cluster", cluster, "--interval", 0.05, "--json", status=0)
    facts = json.loads(done.stdout)
    documented = {"servers", "shards", "missing", "slow", "unserved", "mode", "rollout"}
    assert set(facts) == {*documented, "interval_s"}
    assert facts["mode"] == "full" and facts["slow"] == [] and facts["unserved"] is None
    assert facts["rollout"] is None
    assert facts["shards"] == [0, 1]
    assert facts["missing"] == []
    for server in facts["servers"]:
        assert set(server) == {field.name for field in fields(Row)}
        assert server["state"] == "ready"
        assert server["queries_per_s"] == 0
        assert server["round_trip_ms"] > 0
        assert server["error"] is None


def test_a_model_that_no_server_holds_is_told(run, cluster, tmp_path) -> None:
    """A slip in cluster.toml: no client could begin, so it is not well."""
    facts = json.loads(run("status", "--cluster", cluster, "--interval", 0.05, "--json").stdout)
    held = facts["servers"][0]["model"]
    slip = tmp_path / "cluster.toml"
    slip.write_text(f'model = "{"0" * 32}"\n{cluster.read_text()}')
    done = run("status", "--cluster", slip, "--interval", 0.05)
    out = done.stdout.decode()
    assert done.returncode == 1, done.stderr
    assert f"names model {'0' * 32}" in out and f"they hold {held}." in out
    assert "mode: unknown" in out
    slip.write_text(f'model = "{held}"\n{cluster.read_text()}')
    done = run("status", "--cluster", slip, "--interval", 0.05)
    assert (done.returncode, b"mode: full" in done.stdout) == (0, True)


def test_no_command_goes_through_the_environments_proxy(cluster, environ) -> None:
    """One that does not answer changes nothing."""
    dead = dict.fromkeys(VARIABLES, f"http://{dead_address()}")
    for command_line in (("status", "--interval", 0.05), ("score", "-")):
        done = forked.run(
            command(*command_line),
            cwd=cluster.parent,
            env={**environ, **dead},
            input=b"a b\n",
            capture_output=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr


def test_wait_ends_once_every_listed_server_is_ready(run, cluster, tmp_path) -> None:
    """With 0; with 1 where one is not in time, though its shard has another."""
    run("status", "--cluster", cluster, "--wait", 60, "--interval", 0.05, status=0)
    listed = tmp_path / "cluster.toml"
    more = f'\n[[server]]\naddress = "{dead_address()}"\nshard = 0\n'
    listed.write_text(cluster.read_text() + more)
    late = run("status", "--cluster", listed, "--wait", 0.1, "--interval", 0.05, status=1)
    assert " silent " in late.stdout.decode()


@pytest.mark.slow
def test_wait_waits_for_the_cluster_file_too(run, cluster, tmp_path, environ) -> None:
    """And follows it where an earlier cluster left one; without it in time, status 1."""
    late = run("status", "--wait", 0.1, "--interval", 0.05, cwd=tmp_path, status=1)
    assert b"cluster.toml does not exist" in late.stderr
    listed = tmp_path / "cluster.toml"
    with forked.Popen(
        command("status", "--wait", WAIT_S, "--interval", 0.05),
        cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True,
    ) as waiting:  # fmt: skip
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        listed.write_text(f'[[server]]\naddress = "{dead_address()}"\nshard = 0\n')
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        listed.write_text(cluster.read_text())
        out, _ = waiting.communicate(timeout=WAIT_S)
    assert waiting.returncode == 0
    assert "2 of 2 servers ready\n" in out


def test_a_line_says_how_many_servers_are_ready_and_which_shards_lack_some() -> None:
    """A server counts once, however many models it has."""
    rows = [full_row(f"a:{n}", n % 3, model) for n in range(6) for model in range(4)]
    whole = ClusterSnapshot(tuple(rows), (0, 1, 2), ())
    assert ready(whole) == ("6 of 6 servers ready", "green")
    rows[0] = replace(rows[0], state="draining")
    one = ClusterSnapshot(tuple(rows), (0, 1, 2), ())
    assert ready(one) == ("5 of 6 servers ready; shard 0 has 1 of 2", "yellow")
    silent = [Row(f"b:{n}", n) for n in range(6)]
    none = ClusterSnapshot(tuple(silent), tuple(range(6)), tuple(range(6)))
    shards = ", ".join(f"shard {n} has 0 of 1" for n in range(4))
    expected = f"0 of 6 servers ready; {shards}, and 2 more shards lack servers"
    assert ready(none) == (expected, "red")


@pytest.mark.promise("exit_statuses")
def test_a_dead_server_is_a_row_and_status_1(run, cluster, tmp_path) -> None:
    """With its error; the shard is named."""
    address = dead_address()
    text = cluster.read_text() + f'\n[[server]]\naddress = "{address}"\nshard = 2\n'
    (tmp_path / "cluster.toml").write_text(text)
    done = run("status", "--interval", 0.05, cwd=tmp_path, status=1)
    out = done.stdout.decode()
    assert f"{address}: gave no answer" in out
    assert out.index("gave no answer") < out.index("delay")
    assert "shard 2: no server is ready" in out
    assert out.count(" ready ") == 2
    done = run("status", "--interval", 0.05, "--json", cwd=tmp_path, status=1)
    facts = json.loads(done.stdout)
    assert (facts["missing"], facts["mode"]) == ([2], "local_fallback")


# A client, and after it the command.
CONNECT = """
from dlm import Client, ClientConfig
from dlm.cli.main import main
from dlm.errors import UnavailableError
try:
    Client.connect("secured.toml", ClientConfig(connect_s=1.0))
except UnavailableError as exc:
    print(exc, flush=True)
main()
"""


def test_an_expired_certificate_is_told_in_our_words_alone(environ, tmp_path) -> None:
    """Not by gRPC's lines of its own source, unless somebody asks for those."""
    authority = Authority(tmp_path)
    pair = authority.issue("late", expired=True)
    files = build(random_model(5, order=3, words=10, per_order=20), tmp_path / "model", 1)
    with Cluster(files, tls_cert=str(pair.cert), tls_key=str(pair.key)) as cluster:
        listed = f'[[server]]\naddress = "{cluster.addresses[0]}"\n'
        (tmp_path / "secured.toml").write_text(f'{listed}[tls]\nca = "{authority.ca}"\n')
        status = ("status", "--cluster", "secured.toml", "--interval", "0.05")
        done, asked = (
            subprocess.run(
                [*line, *status],
                cwd=tmp_path,
                env={**environ, **more},
                capture_output=True,
                timeout=WAIT_S,
            )
            for line, more in (
                ([sys.executable, "-c", CONNECT], {}),
                (command(), {"GRPC_VERBOSITY": "info"}),
            )
        )
    assert (done.returncode, done.stderr) == (1, b"")
    assert done.stdout.count(b"certificate has expired") == 2
    assert (asked.returncode, b"ssl_transport_security" in asked.stderr) == (1, True)


def test_nobody_there_is_status_1_though_the_file_names_no_shard(run, tmp_path) -> None:
    """Nobody can tell which shards are missing; that nothing answers is plain."""
    text = "".join(f'[[server]]\naddress = "{dead_address()}"\n' for _ in range(2))
    (tmp_path / "cluster.toml").write_text(text)
    done = run("status", "--interval", 0.05, cwd=tmp_path)
    out = done.stdout.decode()
    assert done.returncode == 1
    assert "no server is ready" in out and "mode: local_fallback" in out
    done = run("status", "--interval", 0.05, "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["mode"]) == (1, "local_fallback")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "--watch"], "--json and --watch"),
        (["--interval", "0"], "--interval is 0; expected above 0 and at most 3,600"),
        (["--timeout", "-1"], "--timeout is -1; expected above 0 and at most 3,600"),
        (["--cluster", "nowhere.toml"], "nowhere.toml does not exist"),
        (["--token-file", "nowhere.token"], "nowhere.token cannot be read: No such file"),
        (["--ca", "nowhere.pem"], "nowhere.pem cannot be read: No such file"),
    ],
)
def test_wrong_usage_is_told(run, cluster, arguments, said) -> None:
    """On standard error, with status 1."""
    done = run("status", *arguments, cwd=cluster.parent, status=1)
    assert said in done.stderr.decode()
    assert not done.stdout  # no server is blamed


def drawn(snapshot: ClusterSnapshot, width: int, height: int | None = None) -> list[str]:
    """The lines that a terminal shows."""
    console = Console(width=width, height=height or 100)
    with console.capture() as captured:
        console.print(render(snapshot, width, height))
    return captured.get().splitlines()


def full_row(address: str, shard: int, model: int = 0) -> Row:
    """A model of a server of four processes, with every number there is."""
    return Row(
        *(address, shard, "ready", 4, 4, f"{model}b5c25daac8e", f"{model}4ac9cb60a1f"),
        *(123456.7, 1234.5, 12, 7, 199.5, 512 << 20, 18_605.0, 3.0, 12.25, 12.5, 1.25, 2.5),
    )


SILENT = Row("10.0.0.9:50060", 9, error="10.0.0.9:50060 gave no answer: UNAVAILABLE: nobody")
LARGE = ClusterSnapshot(
    (*(full_row(f"10.20.30.{n}:50060", n // 2, w) for n in range(8) for w in range(4)), SILENT),
    (*range(4), 9),
    (9,),
)


@pytest.mark.parametrize("address", ["127.0.0.1:50060", "lm-dlm-0.lm-dlm.speech.svc.cluster:50060"])
def test_eighty_columns_show_what_matters(address) -> None:
    """Whole addresses, if need be in two lines, and no column without width."""
    lines = drawn(ClusterSnapshot((full_row(address, 3),), (3,), ()), 80)
    assert max(map(len, lines)) <= 80
    cells = [[c.strip() for c in re.split("[│┃]", x)[1:-1]] for x in lines if x[0] in "│┃"]
    assert cells[0] == ["address", "shard", "state", "queries/s", "CPU %"] or (
        address == "127.0.0.1:50060" and set(cells[0]) > {"shard", "CPU %", "in flight"}
    )
    assert "".join(row[0] for row in cells[1:]) == address
    first = dict(zip(cells[0], cells[1], strict=True))
    assert (first["shard"], first["state"]) == ("3", "ready")
    assert (first["queries/s"], first["CPU %"]) == ("123,457", "200")


def test_two_sets_of_a_server_are_told_apart_in_eighty_columns() -> None:
    """As during a roll-out; with one set, its name is the first that a narrow terminal drops."""
    row = full_row("127.0.0.1:50060", 3)
    other = replace(row, shard_set="0123456789ab")
    shown = "\n".join(drawn(ClusterSnapshot((row, other), (3,), ()), 80))
    assert "04ac9cb60a1f" in shown and "0123456789ab" in shown
    assert "04ac9cb60a1f" not in "\n".join(drawn(ClusterSnapshot((row,), (3,), ()), 80))


def test_a_wide_terminal_shows_every_column() -> None:
    """And a pipe does, however long the addresses are."""
    snapshot = ClusterSnapshot((full_row("127.0.0.1:50060", 0),), (0,), ())
    header = next(line for line in drawn(snapshot, 200) if "address" in line)
    assert all(column in header for column in COLUMNS)


@pytest.mark.parametrize(("height", "addresses"), [(60, 33), (24, 9), (14, 5), (9, 1)])
def test_a_screen_that_is_too_low_shows_a_row_a_server_or_a_shard(height, addresses) -> None:
    """What is wrong stands above, and no line is below the last of the screen."""
    lines = drawn(LARGE, 80, height)
    assert len(lines) < height
    assert lines[0].startswith("10.0.0.9:50060: gave no answer")
    assert lines[1] == "shard 9: no server is ready"
    rows = [line for line in lines if line.startswith("│")]
    assert len(rows) == addresses
    if height == 24:
        assert all("493,827" in row for row in rows[:-1])
    if height == 14:
        assert all("2 servers" in row for row in rows[:-1])
    if height == 9:
        assert "showing the first of " in lines[2]


def test_what_is_wrong_with_several_servers_is_said_once() -> None:
    """With the addresses before it, and none in it."""
    rows = [
        Row(f"h:{n}", n, error=f"h:{n} gave no answer: UNAVAILABLE: ipv4:h:{n}: refused")
        for n in range(3)
    ]
    lines = problems(ClusterSnapshot((*rows, SILENT), (0,), ()))
    assert lines == [
        "h:0, h:1, h:2: gave no answer: UNAVAILABLE: refused",
        "10.0.0.9:50060: gave no answer: UNAVAILABLE: nobody",
        "no server is ready",
    ]


def test_watching_without_a_terminal_prints_look_after_look(cluster, environ) -> None:
    """Each with its time, as it happens, whole."""
    process = forked.Popen(
        command("status", "--cluster", cluster, "--watch", "--interval", 0.05),
        env=environ,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    seen = b""
    while seen.count(b"delay") < 3:
        seen += os.read(process.stdout.fileno(), 65536)
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    assert process.wait(WAIT_S) in (0, 1)  # 1 where it wrote to the pipe that was closed
    times = re.findall(rb"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d$", seen, re.M)
    assert len(times) == 3


def test_watching_ends_with_ctrl_c(cluster, environ) -> None:
    """The table is drawn anew on a terminal until the signal; status 0, no traceback."""
    parent, child = pty.openpty()
    process = forked.Popen(
        command("status", "--cluster", cluster, "--watch", "--interval", 0.05),
        env={**environ, "TERM": "xterm", "COLUMNS": "180"},
        stdout=child,
        stderr=subprocess.PIPE,
    )
    os.close(child)
    seen = b""
    while seen.count(b"delay") < 3:
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
    assert process.wait(WAIT_S) == 0, errors
    assert errors == b""
    assert b"ready" in seen


def test_what_is_not_known_is_left_empty() -> None:
    """A silent server has its address, its state and its error, and nothing invented."""
    row = Row("10.0.0.1:5", None, error="10.0.0.1:5 gave no answer")
    assert cells_of(row) == ["10.0.0.1:5", "?", "silent", *[""] * (len(COLUMNS) - 3)]
    full = Row(
        *("10.0.0.1:5", 3, "ready", 4, 4, "aa", "bb", 12345.6, 7.0, 1, 2, 99.6, 5 << 20, 61.0),
        *(0.5, 0.25, 0.34, 1.06, 12.34),
    )
    assert cells_of(full)[1:] == [
        *("3", "ready", "4", "bb", "12,346", "7", "1", "12.3 %", "2", "100", "5.0 MiB"),
        *("1 m 1 s", "0.3 ms 1.1x"),
    ]


def test_what_a_server_says_is_no_markup() -> None:
    """An error in brackets is shown as it is."""
    snapshot = ClusterSnapshot((Row("h:1", 0, error="[bold]x[/nothing]"),), (0,), (0,))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(snapshot))
    assert "[bold]x[/nothing]" in captured.get()


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(59.9, "59 s"), (60, "1 m 0 s"), (18_605, "5 h 10 m"), (1_047_600, "12 d 3 h")],
)
def test_durations(seconds, told) -> None:
    """Two units at most."""
    assert duration(seconds) == told
