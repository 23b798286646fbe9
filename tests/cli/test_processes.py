"""Clusters on this machine: started whole, stopped whole."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from certificates import Authority
from cli.conftest import Run
from cli.support import command, wait_for
from cluster import WAIT_S


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _gone(pids: list[int]) -> bool:
    def ended(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    return all(ended(pid) for pid in pids)


def _start(folder: Path, home: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command("cluster", folder / "shards"),
        cwd=home,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wait_for((home / "cluster.toml").exists, process)
    return process


def _wait_gone(pids: list[int]) -> None:
    limit = time.monotonic() + WAIT_S
    while not _gone(pids):
        assert time.monotonic() < limit, f"{pids} live on"
        time.sleep(0.02)


def test_ctrl_c_stops_every_server_and_removes_the_file(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Exit status 0, no server left, no cluster.toml that names nothing."""
    process = _start(folder, tmp_path, environ)
    servers = _children(process.pid)
    assert len(servers) == 2
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    _wait_gone(servers)
    assert not (tmp_path / "cluster.toml").exists()


def test_a_server_that_dies_stops_the_cluster_with_its_name(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Half a cluster would be an outage nobody sees."""
    process = _start(folder, tmp_path, environ)
    servers = _children(process.pid)
    os.kill(servers[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert re.search(rb"the server of shard \d at \S+ ended with status -9", stderr)
    _wait_gone(servers)
    assert not (tmp_path / "cluster.toml").exists()


def test_a_second_cluster_does_not_take_the_file_of_the_first(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Refused while the first runs; the file of one that was killed is replaced."""
    process = _start(folder, tmp_path, environ)
    written = (tmp_path / "cluster.toml").read_bytes()
    second = subprocess.run(
        command("cluster", folder / "shards"),
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        timeout=WAIT_S,
    )
    assert second.returncode == 1
    assert b"names a cluster that runs" in second.stderr
    assert (tmp_path / "cluster.toml").read_bytes() == written
    servers = _children(process.pid)
    process.kill()
    process.communicate(timeout=WAIT_S)
    _wait_gone(servers)
    assert (tmp_path / "cluster.toml").exists()
    again = subprocess.Popen(
        command("cluster", folder / "shards"), cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL
    )
    wait_for(lambda: (tmp_path / "cluster.toml").read_bytes() != written, again)
    again.terminate()
    assert again.wait(WAIT_S) == 0


def test_no_server_outlives_a_cluster_that_was_killed(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """kill -9 on the command still ends the servers."""
    process = _start(folder, tmp_path, environ)
    servers = _children(process.pid)
    process.kill()
    process.communicate(timeout=WAIT_S)
    _wait_gone(servers)


def test_what_lies_in_the_current_folder_is_not_part_of_the_servers(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """A queue.py of the user's, and a folder dlm/: Python would import them in place of its own."""
    trap = "import os; open(os.path.join(os.path.dirname(__file__), 'imported'), 'w')"
    (tmp_path / "queue.py").write_text(trap)
    (tmp_path / "dlm").mkdir()
    (tmp_path / "dlm/__init__.py").write_text(trap)
    process = subprocess.Popen(
        # As the script `dlm`, whose own folder is in place of the current one.
        [sys.executable, "-P", "-m", "dlm.cli.main", "cluster", folder / "shards"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for((tmp_path / "cluster.toml").exists, process)
    finally:
        process.terminate()
        process.wait(WAIT_S)
    assert not list(tmp_path.rglob("imported"))


def test_a_port_that_is_taken_is_told(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The command fails with the server's own message, and stops the other server."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
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


def test_the_demo_ends_with_every_score_equal(tmp_path: Path, environ: dict[str, str]) -> None:
    """The main job, on the model that comes with the package, with text of one's own."""
    text = tmp_path / "text.txt"
    text.write_text("the man went to the house\nthere was no xyzzy in it\n")
    done = subprocess.run(
        [sys.executable, "-m", "dlm.cli.main", "demo", "--shards", "2", "--text", str(text)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rb"All [\d,]+ scores equal the ARPA model's, bit for bit", done.stdout)
    assert list(tmp_path.iterdir()) == [text]


def test_a_cluster_of_two_models_answers_as_each(
    folder: Path, other: Path, run: Run, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Two shards of one and three of the other, two processes a server: three servers. Without
    --model the one that all who hold it name first is asked."""
    process = subprocess.Popen(
        command("cluster", folder / "shards", other, "--workers", 2),
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
    )
    wait_for((tmp_path / "cluster.toml").exists, process)
    try:
        servers = _children(process.pid)
        assert [len(_children(pid)) for pid in servers] == [2, 2, 2]
        text = b"a b c d\nd a b\n"
        for shards, more in ((folder / "shards", True), (other, True), (folder / "shards", False)):
            model = json.loads(run("info", shards, "--json").stdout)["model"]
            chosen = ["--model", model[:8]] if more else []
            served = run("score", *chosen, cwd=tmp_path, text=text)
            local = run("score", "--local", shards, text=text)
            assert served.returncode == local.returncode == 0, served.stderr + local.stderr
            assert served.stdout == local.stdout
        unknown = run("score", "--model", "0" * 8, cwd=tmp_path)
        assert unknown.returncode == 1
        assert b"no server holds a model 00000000" in unknown.stderr
    finally:
        workers = [pid for server in _children(process.pid) for pid in _children(server)]
        process.terminate()
        printed, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert printed.count(b"shard set") == 2
    _wait_gone(workers)


def test_a_cluster_of_replicas_outlives_one_of_each_shard(
    folder: Path, run: Run, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Two servers of each of two shards; scores are the same with all, and without one of each."""
    process = subprocess.Popen(
        command("cluster", folder / "shards", "--replicas", 2),
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wait_for((tmp_path / "cluster.toml").exists, process)
    try:
        servers = _children(process.pid)
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
        _, stderr = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert stderr.count(b"its replicas go on") == 2
    assert b"none is left, stopping the others" in stderr


def test_workers_do_not_outlive_a_cluster_that_was_killed(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Two generations below."""
    process = subprocess.Popen(
        command("cluster", folder / "shards", "--workers", 2),
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
    )
    wait_for((tmp_path / "cluster.toml").exists, process)
    servers = _children(process.pid)
    workers = [pid for server in servers for pid in _children(server)]
    assert len(workers) == 4
    process.kill()
    process.wait()
    _wait_gone(servers + workers)


def test_a_servers_log_is_json_and_nothing_else(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """gRPC has a line of its own for a stranger who speaks no TLS: it is not there. Every event has
    the time in UTC, the shard and, when it is bound, the address."""
    pair = Authority(tmp_path).server
    process = subprocess.Popen(
        command(
            *("serve", folder / "shards", "--shard", 1, "--ready-file", "ready"),
            *("--tls-cert", pair.cert, "--tls-key", pair.key),
        ),
        cwd=tmp_path,
        env={k: v for k, v in environ.items() if not k.startswith("GRPC_")},
        stderr=subprocess.PIPE,
    )
    wait_for((tmp_path / "ready").exists, process)
    port = json.loads((tmp_path / "ready").read_text())["port"]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        while stranger.recv(4096):
            pass
    process.terminate()
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    events = [json.loads(line) for line in said.splitlines()]
    assert {"server.opened", "server.ready", "server.stopped"} <= {e["event"] for e in events}
    for event in events:
        assert event["shard"] == 1
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", event["time"])
    ready = next(event for event in events if event["event"] == "server.ready")
    assert ready["address"] == f"127.0.0.1:{port}"
    told = datetime.fromisoformat(ready["time"])
    assert abs((datetime.now(UTC) - told).total_seconds()) < 600


def test_events_keep_their_names_and_name_their_worker(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """A line of JSON each: the event, and in a worker's lines which one it is."""
    process = subprocess.Popen(
        command("serve", folder / "shards", "--shard", 0, "--workers", 2, "--ready-file", "ready"),
        cwd=tmp_path,
        env=environ,
        stderr=subprocess.PIPE,
    )
    wait_for((tmp_path / "ready").exists, process)
    process.terminate()
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    events = [json.loads(line) for line in said.splitlines()]
    seen = {(event["event"], event.get("worker")) for event in events}
    assert {event["shard"] for event in events} == {0}
    for worker in (0, 1):
        for name in (
            "server.worker.started",
            "server.ready",
            "server.state",
            "server.worker.exited",
        ):
            assert (name, worker) in seen
    assert ("server.supervisor.ready", None) in seen
    assert ("server.stopped", None) in seen
