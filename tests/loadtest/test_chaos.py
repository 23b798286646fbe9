"""`python -m loadtest chaos`: what it understands and refuses, and a cluster that it breaks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forked
from cluster import WAIT_S, CommandServer, ModelFiles, build, command, until
from dlm.client.cluster_file import ClusterToml, Endpoint, write_cluster_file
from dlm.errors import ConfigError
from loadtest.cli.main import app
from loadtest.run.chaos import Command, parse, random_faults, read_script
from models import HAND_MADE

ROOT = Path(__file__).parents[2]
CHAOS = [sys.executable, "-m", "loadtest", "chaos"]
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a cache folder of its own."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "PYTHONPATH": str(ROOT), "DLM_CACHE_DIR": cache}


@pytest.fixture(scope="module")
def run(environ: dict[str, str]) -> Run:
    """Runs a command line with a text as its input, and returns what it printed."""

    def call(*line: object, cwd: Path, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return forked.run(
            list(map(str, line)),
            cwd=cwd,
            env=environ,
            input=text,
            capture_output=True,
            timeout=WAIT_S,
        )

    return call


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("kill 0", Command("kill", 0)),
        ("  stop   2 ", Command("stop", 2)),
        ("slow 1 50", Command("slow", 1, 50.0)),
        ("drop 1", Command("drop", 1, 1.0)),
        ("drop 1 0.5", Command("drop", 1, 0.5)),
        ("half-open 0", Command("half-open", 0)),
        ("heal all", Command("heal")),
        ("list", Command("list")),
    ],
)
def test_a_line_is_a_command(line: str, found: Command) -> None:
    """And says itself again."""
    assert parse(line, 3) == found
    assert parse(str(found), 3) == found


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("explode 0", "kill N; start N; stop N"),
        ("kill", "'kill' does not name a server; expected kill N, with N from 0 to 2"),
        ("slow", "slow N MS, with N from 0 to 2"),
        ("heal", "heal N, or heal all, with N from 0 to 2"),
        ("kill 3", "servers are 0 to 2"),
        ("kill -1", "servers are 0 to 2"),
        ("kill 0 1", "expected nothing"),
        ("slow 0", "MS, a number from 0 to 60000"),
        ("stall 0 2", "P, a number from 0 to 1"),
        ("corrupt 0 nan", "P, a number from 0 to 1"),
    ],
)
def test_a_line_that_is_no_command_is_told_what_was_expected(line: str, says: str) -> None:
    """Nothing is done then."""
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(line, 3)


def test_a_script_is_read_in_the_order_of_its_times() -> None:
    """Comments and empty lines are left out; what is wrong is told with its line."""
    text = "# a story\nat 2 heal all\n\nat 0.5 kill 1  # the first\n"
    assert read_script(text, 2, Path("s")) == [(0.5, Command("kill", 1)), (2.0, Command("heal"))]
    for wrong in ("kill 1", "at kill 1", "at -1 kill 1"):
        with pytest.raises(ConfigError, match="s, line 2"):
            read_script("\n" + wrong, 2, Path("s"))
    with pytest.raises(ConfigError, match="servers are 0 to 1") as caught:
        read_script("at 1 kill 2", 2, Path("s"))
    assert caught.value.__notes__ == ["in s, line 1"]


def test_random_faults_are_those_of_their_seed_and_are_all_taken_back() -> None:
    """Every kind comes, in the order of time; none of a server while another of it lasts."""
    plan = random_faults(7, 600.0, 3, kill=True)
    assert plan == random_faults(7, 600.0, 3, kill=True) != random_faults(8, 600.0, 3, kill=True)
    assert [at for at, _ in plan] == sorted(at for at, _ in plan)
    assert plan[-1] == (600.0, Command("heal"))
    wrong: dict[int, str] = {}
    for at, one in plan[:-1]:
        assert 0 <= at <= 600
        assert one.server is not None
        if one.verb in ("heal", "continue"):
            assert (wrong.pop(one.server) == "stop") == (one.verb == "continue")
        else:
            assert one.server not in wrong
            assert parse(str(one), 3) == one
            if one.verb != "kill":
                wrong[one.server] = one.verb
    assert wrong == {}
    kinds = Counter(one.verb for _, one in plan)
    assert kinds.keys() == {
        *("kill", "stop", "continue", "slow", "stall", "drop", "partition", "blackhole"),
        *("half-open", "corrupt", "heal"),
    }
    assert not any(one.verb == "kill" for _, one in random_faults(7, 600.0, 3, kill=False))


@pytest.mark.slow
def test_what_is_no_cluster_of_this_machine_is_refused(run: Run, tmp_path: Path) -> None:
    """A file written by hand, a server elsewhere, one without a process, one that is another's."""
    path = tmp_path / "cluster.toml"
    path.write_text('[[server]]\naddress = "127.0.0.1:9"\nshard = 0\npid = 1\n')
    for endpoints, says in [
        (None, b"was not written by dlm cluster"),
        ([Endpoint("192.0.2.1:9", 0, 1)], b"gives no process for 192.0.2.1:9"),
        ([Endpoint("127.0.0.1:9", 0)], b"gives no process for 127.0.0.1:9"),
        ([Endpoint("127.0.0.1:9", 0, os.getpid())], b"has exited"),
        ([Endpoint("127.0.0.1:9", 0, 1 << 30)], b"has exited"),
    ]:
        if endpoints is not None:
            write_cluster_file(path, endpoints)
        done = run(*CHAOS, "cluster.toml", cwd=tmp_path, text=b"kill 0\n")
        assert done.returncode == 1
        assert says in done.stderr
        assert not (tmp_path / "chaos.toml").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--kill --script plan.txt", "--kill needs --random"),
        ("--random 1 --script plan.txt", "expected only one of them"),
    ],
)
def test_options_that_say_nothing_together_are_refused(options: str, says: str) -> None:
    """Before anything is read: an option that does nothing would be believed to."""
    done = CliRunner().invoke(app, ["chaos", "cluster.toml", *options.split()])
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)


@pytest.fixture
def chaos(tmp_path: Path, environ: dict[str, str]) -> Iterator[Typed]:
    """`chaos cluster.toml`, once the test has started it."""
    typed = Typed(tmp_path, environ)
    yield typed
    typed.process.kill()
    typed.process.communicate()


class Typed:
    """A command that is told lines, and prints some."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._folder, self._environ = folder, environ

    def start(self) -> str:
        """Returns the first line."""
        self.process = forked.Popen(
            [*CHAOS, "cluster.toml"],
            cwd=self._folder,
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process.stdout.readline()

    def tell(self, *lines: str, printed: int = 1) -> list[str]:
        """The lines that are printed then."""
        self.process.stdin.write("".join(f"{line}\n" for line in lines))
        self.process.stdin.flush()
        return [self.process.stdout.readline() for _ in range(printed)]


@pytest.mark.slow
def test_what_was_stopped_goes_on_however_chaos_ends(
    files: ModelFiles, tmp_path: Path, environ: dict[str, str], chaos: Typed
) -> None:
    """Killed with SIGKILL; else the server would stand still for ever, deaf to SIGTERM, too."""
    cluster = CommandServer(
        "cluster", files.directory, cwd=tmp_path, env=environ, python=["-P"]
    )  # by its command line a server is known
    try:
        cluster.ready()
        pid = ClusterToml(tmp_path / "cluster.toml").servers()[0].pid

        def state() -> str:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

        assert chaos.start()
        assert "stop 0" in chaos.tell("stop 0")[0]
        until(lambda: state() == "T")
        chaos.process.kill()
        until(lambda: state() != "T")
        assert cluster.stop() == 0
    finally:
        cluster.end()


@pytest.mark.slow
def test_a_cluster_is_broken_and_its_clients_see_it_through_the_other_file(
    files: ModelFiles, tmp_path: Path, environ: dict[str, str], run: Run, chaos: Typed
) -> None:
    """Killed and started again at its port with another pid; slow; stopped until the end."""
    other = build(HAND_MADE["weight_without_continuation"], tmp_path / "other", 3).directory
    line = ("cluster", files.directory, "--replicas", 2, "--restart", "--local-fallback", other)
    cluster = CommandServer(*line, cwd=tmp_path, env=environ, python=["-P"])
    try:
        cluster.ready()
        before = ClusterToml(tmp_path / "cluster.toml").servers()
        assert chaos.start().startswith("wrote chaos.toml: 4 servers")
        through = ClusterToml(tmp_path / "chaos.toml").servers()
        assert [e.shard for e in through] == [e.shard for e in before] == [0, 1, 0, 1]
        assert not {e.address for e in through} & {e.address for e in before}
        assert ClusterToml(tmp_path / "chaos.toml").local_fallback() == other
        lines = ("kill 0", "slow 1 20", "stop 2", "explode 2", "list")
        killed, slowed, *_, row_1, row_2, _ = chaos.tell(*lines, printed=8)
        place = f"shard 0 at {before[0].address}, pid {before[0].pid}"
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT[0-9:.]+Z kill 0: {place}\n", killed)
        assert slowed.endswith(f"slow 1 20: shard 1 at {before[1].address}\n")
        assert "delay_s 0.02" in row_1
        assert f"pid {before[2].pid}, stopped  ok" in row_2
        until(lambda: ClusterToml(tmp_path / "cluster.toml").servers()[0].pid != before[0].pid)
        after = ClusterToml(tmp_path / "cluster.toml").servers()
        assert [e.address for e in after] == [e.address for e in before]
        assert [e.pid for e in after[1:]] == [e.pid for e in before[1:]]
        assert "continue 2" in chaos.tell("continue 2")[0]
        scored = run(*command("score", "--cluster", "chaos.toml"), cwd=tmp_path, text=b"a b c\n")
        local = run(*command("score", "--local", files.directory), cwd=tmp_path, text=b"a b c\n")
        assert scored.stdout == local.stdout, scored.stderr
        refused = run(*CHAOS, "chaos.toml", "--through", "more.toml", cwd=tmp_path)
        assert b"gives no process" in refused.stderr
        _, errors = chaos.process.communicate("stop 2\n", timeout=WAIT_S)
        assert chaos.process.returncode == 0
        assert "'explode 2' is not a command" in errors
        assert not (tmp_path / "chaos.toml").exists()
        # What was held goes on, so that the cluster ends as ever.
        assert cluster.stop() == 0
        assert "was killed (SIGKILL); restarted" in cluster.errors
        assert not (tmp_path / "cluster.toml").exists()
    finally:
        cluster.end()
