"""dlm.server.workers: several processes on one port, whatever happens to any of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import forked
from cluster import WAIT_S, ProcessServer, children, gone, until
from dlm.errors import ConfigError
from dlm.server.app import serve
from dlm.server.config import ServerConfig
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason
from server.calls import Caller, outcome, outcome_of
from server.test_security import ALICE, BOB, metadata_of, write_tokens

MIB = 1 << 20

# A supervisor whose workers do what the test says, at the moments that the test says.
SUPERVISED = """
import os, signal, sys
from dlm.errors import ConfigError
from dlm.server.config import ServerConfig
from dlm.server.process import Notice, Ready
from dlm.server.workers import Supervisor

def say(*what):
    os.write(1, (" ".join(map(str, what)) + chr(10)).encode())

def ready(port, process, tell):
    tell(Ready("127.0.0.1", port, 0, "00", os.getpid(), ["00"]))

def warm():
    {warm}

def work(port, process, tell):
    {work}

notice = Notice(lambda ready: say("ready", ready.workers, ready.pid == os.getpid()))
try:
    status = Supervisor(
        ServerConfig(workers=2, shutdown_timeout_s=0.0), warm=warm, work=work, notice=notice
    ).run()
except ConfigError as exc:
    say("refused", exc)
    status = 3
sys.exit(status)
"""


def supervised(work: str, warm: str = "pass") -> subprocess.Popen[str]:
    """A supervisor of two such workers."""
    return forked.Popen(
        [sys.executable, "-c", SUPERVISED.format(work=work, warm=warm)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """The next lines that it prints."""
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def rest(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status, and what it printed since."""
    said, _ = process.communicate(timeout=WAIT_S)
    return process.returncode, said


@contextlib.contextmanager
def one_of_each(address: str, workers: int) -> Iterator[dict[int, Caller]]:
    """A connection to each worker: the system deals them out, so some are made in vain."""
    made: list[Caller] = []
    found: dict[int, Caller] = {}
    try:
        while len(found) < workers:
            assert len(made) < 200
            made.append(Caller(address))
            found.setdefault(made[-1].beat().worker, made[-1])
        yield found
    finally:
        for caller in made:
            caller.close()


@pytest.fixture
def two(start) -> ProcessServer:
    """A server of two workers."""
    return start(0, workers=2).ready()


def test_workers_share_a_port_and_tell_themselves_apart(sharded, two):
    """Ready is said once, by the supervisor; each answers, and costs little memory of its own."""
    assert two.notice["workers"] == 2
    assert two.notice["pid"] == two.process.pid
    assert len(children(two.process.pid)) == 2
    rng = np.random.default_rng(1)
    with one_of_each(two.address, 2) as callers:
        for index, caller in callers.items():
            asked = sharded.questions.ask(rng, 0, 60)
            sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
            beat = caller.beat()
            assert (beat.worker, beat.workers, beat.messages) == (index, 2, 1)
            assert beat.cpu_ms > 0
            assert 0 < beat.memory_bytes < 60 * MIB
        assert len({caller.beat().instance for caller in callers.values()}) == 2
    two.process.terminate()
    assert two.wait() == 0
    assert two.errors.count("worker.started") == two.errors.count("worker.exited") == 2
    assert two.printed == f"{two.port}\n"


@pytest.mark.promise("workers_replaced")
def test_a_killed_worker_is_replaced_while_the_others_answer(sharded, two):
    """kill -9 under load: right answers or UNAVAILABLE, the other worker goes on, and a new process
    answers for the one that is gone."""
    rng = np.random.default_rng(2)
    asked = [sharded.questions.ask(rng, 0) for _ in range(20)]
    with one_of_each(two.address, 2) as callers:
        before = {index: caller.beat() for index, caller in callers.items()}
        pids = children(two.process.pid)
        for round_ in range(3):
            sent = [
                (index, one, caller.score.future(one.data, timeout=WAIT_S))
                for one in asked
                for index, caller in callers.items()
            ]
            if round_ == 1:
                os.kill(pids[0], signal.SIGKILL)
            codes: dict[int, set[grpc.StatusCode]] = {0: set(), 1: set()}
            for index, one, future in sent:
                found = outcome_of(future)
                codes[index].add(found.code)
                if found.code is grpc.StatusCode.OK:
                    sharded.questions.verify(0, one, found.data)
            assert {grpc.StatusCode.OK} in codes.values()  # the one that lives
            for seen in codes.values():
                assert seen <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    until(lambda: two.errors.count("worker.started") == 3)
    with one_of_each(two.address, 2) as callers:
        after = {index: caller.beat() for index, caller in callers.items()}
        (new,) = (i for i in after if after[i].instance != before[i].instance)
        assert after[new].messages <= len(asked)  # it may have had the last round
        assert after[1 - new].messages >= 3 * len(asked)
        sharded.questions.verify(0, asked[0], callers[new].score(asked[0].data, timeout=WAIT_S))
    assert pids[0] not in children(two.process.pid)
    two.process.terminate()
    assert two.wait() == 0


def shown(port: int, name: str, **labels: str) -> dict[str, float]:
    """Of each worker the sample of that name and those labels, as a scrape shows it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {
        sample.labels["worker"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


def test_one_port_shows_the_metrics_of_all_workers(sharded, start, monkeypatch):
    """Also after a worker was replaced, and after the process that shows them was."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rng = np.random.default_rng(5)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        server = start(0, workers=2, metrics_port=port).ready()
        with one_of_each(server.address, 2) as callers:
            for caller in callers.values():
                asked = sharded.questions.ask(rng, 0)
                sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
            requests = "dlm_server_requests_total"
            until(lambda: shown(port, requests, result="ok") == {"0": 1, "1": 1})
            assert shown(port, requests, result="UNAUTHENTICATED") == {"0": 0, "1": 0}
        first, _, shows = children(server.process.pid)
        os.kill(shows, signal.SIGKILL)
        until(lambda: server.errors.count("exposition.started") == 2)
        assert shown(port, "dlm_server_state", state="ready") == {"0": 1, "1": 1}
        os.kill(first, signal.SIGKILL)
        until(lambda: shown(port, "dlm_server_worker_restarts_total") == {"0": 1, "1": 0})
        assert list(Path(folder).iterdir()) == []  # nothing a kill could leave
        server.process.terminate()
        assert server.wait() == 0
    assert server.errors.count("exposition.exited") == 1


def test_a_port_for_metrics_that_is_taken_ends_the_start(sharded, start):
    """Before anything is compiled, with the setting that it comes from."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start(0, workers=2, metrics_port=taken.getsockname()[1])
        assert server.wait() != 0
    assert "--metrics-port" in server.errors
    assert "worker.started" not in server.errors


def test_workers_end_when_the_supervisor_is_killed(two):
    """Nobody would replace or stop them."""
    pids = children(two.process.pid)
    assert len(pids) == 2
    two.process.kill()
    two.wait()
    until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_signal_reaches_every_worker_and_ready_goes(sharded, start, tmp_path, number):
    """A message in flight is answered; a signal sent to the whole group counts once."""
    ready_file = tmp_path / "ready.json"
    server = start(0, workers=2, inline_queries=0, shutdown_timeout_s=60.0, ready_file=ready_file)
    server.ready()
    assert json.loads(ready_file.read_text()) == server.notice
    rng = np.random.default_rng(3)
    with one_of_each(server.address, 2) as callers:
        asked = [sharded.questions.ask(rng, 0, 60) for _ in range(40)]
        sent = [
            (a, c.score.future(a.data, timeout=WAIT_S)) for a in asked for c in callers.values()
        ]
        until(lambda: all(caller.beat().messages for caller in callers.values()))
        for pid in (server.process.pid, *children(server.process.pid)):
            os.kill(pid, number)
        for one, future in sent:
            found = outcome_of(future)
            assert found.code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
            if found.code is grpc.StatusCode.OK:
                sharded.questions.verify(0, one, found.data)
    assert server.wait() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 2)])
def test_a_second_server_on_the_port_is_refused(sharded, start, first, second):
    """Whether either has workers that would share it; test_app.py has the case of none."""
    port = start(0, workers=first).ready().notice["port"]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*another process"):
        serve(ServerConfig(port=port, workers=second), [sharded.directory], 0)


def test_several_models_are_served_by_every_worker(sharded, other, start):
    """Both are opened once, before the fork."""
    server = start(1, [sharded.directory, other.directory], workers=2).ready()
    names = [one.manifest.shard_set for one in (sharded, other)]
    assert server.notice["shard_sets"] == names
    assert server.errors.count("server.opened") == 2
    rng = np.random.default_rng(4)
    with one_of_each(server.address, 2) as callers:
        for caller in callers.values():
            reply = pb.DescribeReply.FromString(caller.describe(b"", timeout=WAIT_S))
            assert [name.hex() for name in reply.shard_sets] == names
            for one in (sharded, other):
                asked = one.questions.ask(rng, 1)
                one.questions.verify(1, asked, caller.score(asked.data, timeout=WAIT_S))


def test_a_replaced_folder_changes_nothing_for_a_new_worker(sharded, start, tmp_path):
    """A worker that comes later hands out the files that the first ones were started with."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for path in sharded.directory.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    server = start(0, folder, workers=2).ready()
    for path in folder.iterdir():
        path.rename(path.with_suffix(".old"))
        path.write_bytes(b"something else")
    for pid in children(server.process.pid):
        os.kill(pid, signal.SIGKILL)
    until(lambda: server.errors.count("server.ready") == 4)
    rng = np.random.default_rng(5)
    request = pb.DownloadRequest(
        shard_set=sharded.manifest.shard_set_bytes, file=pb.DOWNLOAD_FILE_VOCABULARY
    ).SerializeToString()
    with one_of_each(server.address, 2) as callers:
        for caller in callers.values():
            asked = sharded.questions.ask(rng, 0)
            sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
            (chunk,) = caller.download(request, timeout=WAIT_S)
            size = sharded.manifest.file("vocabulary").bytes
            assert pb.DownloadChunk.FromString(chunk).file_bytes == size
            assert pb.DownloadChunk.FromString(chunk).raw_bytes == size


def test_the_same_model_twice_is_refused(sharded, start):
    """By a worker, before any is ready: its message is the message of the whole."""
    server = start(0, [sharded.directory, sharded.directory], workers=2)
    assert server.wait() == 1
    assert "same shard set" in server.errors


def test_signal_during_the_warm_up_ends_the_supervisor():
    """There is no worker yet, and nothing to drain."""
    process = supervised("pass", warm="say('warming'); signal.pause()")
    assert lines(process, 1) == ["warming"]
    process.terminate()
    assert rest(process) == (0, "")


def test_signal_during_the_start_of_a_server_leaves_nothing_behind(start, tmp_path):
    """Whatever it was doing: it ends, with no worker and no file left."""
    server = start(0, workers=2, ready_file=tmp_path / "ready.json")
    until(lambda: "server.opened" in server.errors)
    workers = children(server.process.pid)
    server.process.terminate()
    assert server.wait() in (0, -signal.SIGTERM)
    assert "Traceback" not in server.errors
    until(lambda: all(map(gone, workers)))
    assert list(tmp_path.iterdir()) == []


def test_signal_before_the_workers_are_ready_ends_them():
    """Those that have not begun to serve have nothing to finish: exit status 0."""
    process = supervised("say('born'); signal.pause()")
    assert lines(process, 2) == ["born", "born"]
    workers = children(process.pid)
    process.terminate()
    assert rest(process) == (0, "")
    assert all(map(gone, workers))


def test_a_second_signal_ends_workers_that_do_not_drain():
    """At once, with status 1."""
    deaf = "signal.signal(signal.SIGTERM, lambda *_: say('asked')); ready(port, process, tell)"
    process = supervised(deaf + "\n    while True: signal.pause()")
    assert lines(process, 1) == ["ready 2 True"]
    process.terminate()
    assert lines(process, 2) == ["asked", "asked"]
    process.send_signal(signal.SIGINT)
    assert rest(process) == (1, "")


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ("raise ConfigError(f'worker {process.worker} has no socks')", "has no socks"),
        ("open('/no/such/file')", "No such file"),
        ("os._exit(5)", "ended with status 5"),
        ("raise RuntimeError('bug')", "ended with status 1"),
        ("return 'no status'", "ended with status 1"),
    ],
)
def test_a_worker_that_cannot_start_ends_the_whole_with_its_message(work, says):
    """Nothing is tried again before the server was ready once; the other worker ends too."""
    process = supervised(
        f"if process.worker: {work}\n    ready(port, process, tell)\n    signal.pause()"
    )
    status, said = rest(process)
    assert status == 3
    assert said.startswith("refused")
    assert says in said


def copied(source: Path, place: Path) -> Path:
    """The files of a shard set, copied."""
    place.mkdir()
    for path in source.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


def ask_until(address: str, data: bytes, holds: Callable[[], bool]) -> None:
    """Asks again and again, whoever answers or dies, on a new connection each time."""

    def asked() -> bool:
        with contextlib.closing(Caller(address)) as caller, contextlib.suppress(grpc.RpcError):
            caller.score(data, timeout=1.0)
        return holds()

    until(asked)


@pytest.mark.promise("not_ready")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shard", "low_orders"])
def test_a_file_cut_off_under_a_server_is_named_and_the_server_not_ready(
    sharded, start, tmp_path, kind
):
    """Its workers die of SIGBUS: it says which file, how many bytes it has and should have, waits
    longer each time, is ready nowhere; and it is whole again by itself once the file is."""
    folder = copied(sharded.directory, tmp_path / "shards")
    ready_file = tmp_path / "ready.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "workers": 2,
        "metrics_port": port,
        "shutdown_timeout_s": 5.0,
        "ready_file": ready_file,
    }
    server = start(0, folder, **config).ready()
    asked = sharded.questions.ask(np.random.default_rng(8), 0, 60)
    entry = sharded.manifest.file(kind, 0 if kind == "shard" else None)
    damaged = folder / entry.name
    whole = damaged.read_bytes()
    first = children(server.process.pid)[:2]
    calm = trouble_by_worker(port)
    assert {labels["model"] for labels, value in calm.values() if not value} == {
        sharded.manifest.model[:12]
    }
    os.truncate(damaged, 0)
    ask_until(server.address, asked.data, lambda: "server.file.damaged" in server.errors)
    said = f"{damaged} has 0 bytes"
    (line,) = (x for x in server.errors.splitlines() if "server.file.damaged" in x)
    assert said in line and f" {entry.bytes}" in line
    assert "signal=SIGBUS" in server.errors
    until(lambda: not ready_file.exists())
    says = f"not ready: {said}"
    until(lambda: probe(port, "/readyz", len(says)) == (503, says))
    # The alert, too, which nobody would raise if the dead were left out of a scrape.
    alerting = {worker: (labels, 1.0) for worker, (labels, _) in calm.items()}
    until(lambda: trouble_by_worker(port) == alerting)
    pauses = re.compile(r"worker.exited worker=(\d) .* again_in_s=([\d.]+) error=\"/")
    until(lambda: len(pauses.findall(server.errors)) >= 3)
    for worker in "01":
        found = [float(pause) for who, pause in pauses.findall(server.errors) if who == worker]
        assert found == [0.25 * 2**k for k in range(len(found))]
    assert server.errors.count("server.file.damaged") == 1
    # As the runbook says: beside it, and renamed.
    (folder / "new").write_bytes(whole)
    (folder / "new").rename(damaged)
    # Those that live map the cut-off file still: they are replaced, touched or not.
    until(ready_file.exists)  # first: a probe waits for seconds for workers that are not there
    until(lambda: probe(port, "/readyz")[0] == 200)
    until(lambda: not set(first) & set(children(server.process.pid)))
    with one_of_each(server.address, 2) as callers:
        for caller in callers.values():
            sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
    assert server.errors.count("server.file.recovered") == 1
    server.process.terminate()
    assert server.wait() == 0, server.errors


def trouble_by_worker(port: int) -> dict[str, tuple[dict[str, str], float]]:
    """Worker -> labels and value of its `dlm_server_not_ready` for a damaged file."""
    return {
        sample.labels["worker"]: (dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(probe(port, "/metrics")[1])
        for sample in family.samples
        if sample.labels.get("cause") == "damaged_file"
    }


def probe(port: int, path: str, length: int | None = None) -> tuple[int, str]:
    """Status of what the metrics port answers, and its text, of an error so many characters."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as reply:
            return reply.status, reply.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()[:length]


def test_a_page_that_cannot_be_read_makes_the_next_worker_read_the_files(sharded, start, tmp_path):
    """The file is whole when it is looked at: nobody is frightened, and all map it anew."""
    folder = copied(sharded.directory, tmp_path / "shards")
    server = start(0, folder, workers=2).ready()
    pids = children(server.process.pid)
    os.kill(pids[0], signal.SIGBUS)
    until(lambda: server.errors.count("server.ready") == 4)
    assert not set(pids) & set(children(server.process.pid))
    assert "server.file.damaged" not in server.errors
    asked = sharded.questions.ask(np.random.default_rng(9), 0, 20)
    with one_of_each(server.address, 2) as callers:
        for caller in callers.values():
            sharded.questions.verify(0, asked, caller.score(asked.data, timeout=WAIT_S))
    server.process.terminate()
    assert server.wait() == 0, server.errors


def test_a_doubt_ends_when_every_worker_has_mapped_anew_and_comes_again_with_the_next_fault():
    """A worker that dies of something else later reads no files and blames none; a second page that
    cannot be read replaces all workers again."""
    work = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "    ready(port, process, tell)\n"
        "    say(process.worker, process.restarts, process.doubts, os.getpid())\n"
        "    while True: signal.pause()"
    )
    process = supervised(work)

    def started(expected: list[str]) -> dict[str, int]:
        """The pids of those that start next."""
        said = [line.rsplit(" ", 1) for line in lines(process, len(expected))]
        assert [line for line, _ in said] == expected
        return {line[0]: int(pid) for line, pid in said}

    said = sorted(lines(process, 3))
    assert [line.rsplit(" ", 1)[0] for line in said] == ["0 0 False", "1 0 False", "ready 2"]
    pids = {line[0]: int(line.rsplit(" ", 1)[1]) for line in said[:2]}
    os.kill(pids["0"], signal.SIGBUS)
    pids = started(["0 1 True", "1 1 True"])
    for restarts in (2, 3):  # at the first, the supervisor may hear of the end before the ready
        os.kill(pids["0"], signal.SIGKILL)
        who, count, doubts, pid = lines(process, 1)[0].split()
        assert (who, count) == ("0", str(restarts))
        pids["0"] = int(pid)
        if doubts == "False":
            break
    assert doubts == "False"
    os.kill(pids["0"], signal.SIGBUS)
    started([f"0 {restarts + 1} True", "1 2 True"])
    process.terminate()
    assert rest(process)[0] == 0


def test_a_folder_that_holds_another_shard_set_after_a_fault_is_refused(
    sharded, other, start, tmp_path
):
    """Two models must not answer on one port: the message names both."""
    folder = copied(sharded.directory, tmp_path / "shards")
    server = start(0, folder, workers=2).ready()
    folder.rename(tmp_path / "old")
    copied(other.directory, folder)
    os.kill(children(server.process.pid)[0], signal.SIGBUS)
    until(lambda: "server.file.damaged" in server.errors)
    (line,) = (x for x in server.errors.splitlines() if "server.file.damaged" in x)
    assert other.manifest.shard_set in line and sharded.manifest.shard_set in line
    assert "restart" in line


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_is_started_again_and_again():
    """Even one that cannot start any more; the other goes on, and the count is kept."""
    work = (
        "say(process.worker, process.restarts, os.getpid())\n"
        "    if process.restarts > 1: raise ConfigError('no more')\n"
        "    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "    ready(port, process, tell)\n"
        "    if process.worker == 0: signal.pause()\n"
        "    if process.restarts: os._exit(9)\n"
        "    signal.sigwait([signal.SIGUSR1])\n    return 0"
    )
    process = supervised(work, warm="signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])")
    zero, one, ready = sorted(lines(process, 3))
    assert ready == "ready 2 True"
    os.kill(int(one.removeprefix("1 0 ")), signal.SIGUSR1)
    assert [line.split()[:2] for line in lines(process, 4)] == [["1", str(n)] for n in range(1, 5)]
    assert int(zero.removeprefix("0 0 ")) in children(process.pid)
    process.terminate()
    assert rest(process)[0] == 0


def test_draining_workers_refuse_what_comes_late(sharded, start):
    """As one process does: DRAINING while something is in flight."""
    server = start(
        0, workers=2, inline_queries=0, threads=1, drain_grace_s=0.0, shutdown_timeout_s=60.0
    ).ready()
    rng = np.random.default_rng(6)
    with one_of_each(server.address, 2) as callers:
        caller = callers[0]
        asked = [sharded.questions.ask(rng, 0, 60) for _ in range(60)]
        sent = [caller.score.future(a.data, timeout=WAIT_S) for a in asked]
        until(lambda: caller.beat().messages > 0)
        server.process.terminate()
        late = {outcome(caller.score, asked[0].data).reason for _ in range(50)}
        assert late <= {None, Reason.DRAINING}
        for one, future in zip(asked, sent, strict=True):
            found = outcome_of(future)
            if found.code is grpc.StatusCode.OK:
                sharded.questions.verify(0, one, found.data)
            else:
                assert found.code is grpc.StatusCode.UNAVAILABLE
    assert server.wait() == 0, server.errors


def test_a_fork_that_fails_is_tried_again_and_ends_nobody():
    """No process was left for a moment: the other worker goes on, and the first comes back."""
    warm = (
        "real, calls = os.fork, []\n"
        "    def fork():\n"
        "        calls.append(1)\n"
        "        if len(calls) in (3, 4): raise BlockingIOError('no process left')\n"
        "        return real()\n"
        "    os.fork = fork\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])"
    )
    work = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "    say(process.worker, process.restarts, os.getpid())\n"
        "    ready(port, process, tell)\n"
        "    if process.worker or process.restarts: signal.pause()\n"
        "    signal.sigwait([signal.SIGUSR1])\n    return 0"
    )
    process = supervised(work, warm)
    zero, one, ready = sorted(lines(process, 3))
    assert ready == "ready 2 True"
    os.kill(int(zero.removeprefix("0 0 ")), signal.SIGUSR1)
    assert lines(process, 1)[0].startswith("0 1 ")
    assert int(one.removeprefix("1 0 ")) in children(process.pid)
    process.terminate()
    assert rest(process) == (0, "")


@pytest.mark.promise("workers_replaced")
@pytest.mark.slow
def test_a_worker_that_is_stuck_is_replaced():
    """Stopped, it keeps its connections and would answer nobody; the other one is left alone."""
    warm = "import dlm.server.workers as workers\n    workers.BEAT_S = 0.2"
    work = (
        "import time\n"
        "    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "    say(process.worker, process.restarts, os.getpid())\n"
        "    ready(port, process, tell)\n"
        "    while True:\n        process.beat()\n        time.sleep(0.002)"
    )
    process = supervised(work, warm)
    zero, one, ready = sorted(lines(process, 3))
    assert ready == "ready 2 True"
    stuck = int(zero.removeprefix("0 0 "))
    os.kill(stuck, signal.SIGSTOP)
    assert lines(process, 1)[0].startswith("0 1 ")
    alive = children(process.pid)
    assert stuck not in alive and int(one.removeprefix("1 0 ")) in alive
    process.terminate()
    assert rest(process) == (0, "")


@pytest.mark.parametrize(
    ("moment", "patience"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "START_LOOKS"),
        (
            "process.beat()\n        os.kill(os.getpid(), signal.SIGSTOP)",
            "SILENT_LOOKS",
        ),
        (
            "ready(port, process, tell)\n        os.kill(os.getpid(), signal.SIGSTOP)",
            "SILENT_LOOKS",
        ),
        ("while True:\n            process.beat(); time.sleep(0.002)", "READY_LOOKS"),
    ],
    ids=["before it said anything", "after a beat", "right after ready", "never ready"],
)
def test_a_worker_that_is_stuck_at_any_moment_of_its_start_is_replaced(moment, patience):
    """Said it is ready and never beaten, or never said anything: the next one takes its place."""
    bounds = {"SILENT_LOOKS": 4000, "START_LOOKS": 4000, "READY_LOOKS": 4000, patience: 3}
    warm = "import dlm.server.workers as workers\n" + "".join(
        f"    {line}\n"
        for line in (
            "workers.BEAT_S = 0.2",
            *(f"workers.{name} = {looks}" for name, looks in bounds.items()),
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
        )
    )
    work = (
        "import time\n"
        "    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "    say(process.worker, process.restarts, os.getpid())\n"
        "    if process.worker == 0 and process.restarts == 1:\n"
        f"        {moment}\n"
        "    ready(port, process, tell)\n"
        "    while not signal.sigtimedwait([signal.SIGUSR1], 0.002): process.beat()\n"
        "    return 0"
    )
    process = supervised(work, warm)
    zero, one, ready = sorted(lines(process, 3))
    assert ready == "ready 2 True"
    os.kill(int(zero.removeprefix("0 0 ")), signal.SIGUSR1)  # the one that follows gets stuck
    assert lines(process, 1)[0].startswith("0 1 ")
    assert lines(process, 1)[0].startswith("0 2 ")
    assert int(one.removeprefix("1 0 ")) in children(process.pid)
    process.terminate()
    assert rest(process) == (0, "")


def test_a_worker_that_is_stuck_in_the_first_start_ends_the_whole_and_is_named():
    """Nobody waits for a server that will never be ready, nor has to guess why."""
    warm = "import dlm.server.workers as workers\n    workers.BEAT_S, workers.START_LOOKS = 0.2, 3"
    process = supervised(
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "    if process.worker: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    ready(port, process, tell)\n    signal.pause()",
        warm,
    )
    status, said = rest(process)
    assert status == 3
    assert said.startswith("refused worker 1 ") and " 0.6 s" in said


@pytest.mark.slow
def test_a_server_whose_worker_is_stuck_answers_on_all_connections_again(start):
    """A real one, at its own pace: its event loop beats, and the stopped one is ended for good."""
    server = start(0, workers=2).ready()
    pids = children(server.process.pid)
    os.kill(pids[0], signal.SIGSTOP)
    until(lambda: server.errors.count("server.ready") == 3)
    assert server.errors.count("server.worker.stuck") == 1
    assert pids[1] in children(server.process.pid)
    with one_of_each(server.address, 2) as callers:
        assert [caller.beat().worker for _, caller in sorted(callers.items())] == [0, 1]
    server.process.terminate()
    assert server.wait() == 0, server.errors


def test_a_first_fork_that_fails_ends_the_start():
    """With what the system said."""
    warm = "def fork(): raise BlockingIOError('no process left')\n    os.fork = fork"
    status, said = rest(supervised("pass", warm))
    assert (status, said) == (3, "refused worker 0 cannot be started: no process left\n")


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["half-written", "gone"])
def test_a_worker_that_comes_later_knows_the_tokens_that_were_last_good(start, tmp_path, bad):
    """Those that the others know: not the bad file, nor the token that was taken away before."""
    tokens = write_tokens(tmp_path / "tokens", f"alice:{ALICE}", f"bob:{BOB}")
    server = start(0, workers=2, tokens=str(tokens)).ready()
    write_tokens(tokens, f"alice:{ALICE}")
    until(lambda: server.errors.count("server.tokens.reloaded") == 3)  # the supervisor among them
    if bad == "gone":
        tokens.unlink()
    else:
        tokens.write_text("alice:")
    until(lambda: server.errors.count("server.tokens.kept") == 3)
    pids = children(server.process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: server.errors.count("server.ready") == 4)
    assert not set(pids) & set(children(server.process.pid))
    caller = Caller(server.address)
    caller.heartbeat(b"", timeout=WAIT_S, metadata=metadata_of(ALICE))
    with pytest.raises(grpc.RpcError) as caught:
        caller.heartbeat(b"", timeout=WAIT_S, metadata=metadata_of(BOB))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    caller.close()
    write_tokens(tokens, f"bob:{BOB}")
    until(lambda: server.errors.count("server.tokens.reloaded") == 6)
    assert server.errors.count("worker.exited") == 2
