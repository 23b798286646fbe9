"""Faults and moves during a load test: scenarios, plans from files, and their execution.

The commands of `dlm` replace models and grow a cluster, as if an operator had typed them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlm.client.cluster_file import ClusterToml, replace_servers
from dlm.cluster.processes import Server, stop
from dlm.errors import ConfigError, DlmError
from dlm.files import scratch_folder
from dlm.index.layout import read_manifest
from dlm.server.child import command_of_child
from dlm.server.sets import read_sets, write_sets
from loadtest.run.chaos import Chaos, Command, read_script, server_pid, write_through
from loadtest.run.local_cluster import LocalServers
from loadtest.run.proxy import Proxies
from loadtest.run.replay import Record

SHARE, UNDO, ROLL_OUT = "share", "undo", "roll-out"
RESHARD, GROW, SHRINK = "reshard", "grow", "shrink"
# verb -> its description for people
MOVES = {
    SHARE: "the servers load another model, which then gets half of the new utterances",
    UNDO: "the new model is taken back",
    ROLL_OUT: "the new model is rolled out completely",
    RESHARD: "a shard set for one more server is made",
    GROW: "the added servers are started, and the new shard set is rolled out",
    SHRINK: "the first shard set is rolled out again, and the added servers are stopped",
}
# These times are short, so that a run of 1.5 minutes has all stages; decoders here do not pause.
RULES = ("--idle", "2", "--longest", "30")
SHARED = ("--share", "50%", "--watch-for", "10000000")
WHOLE = ("--share", "50%", "--watch-for", "5")
LOOK_S = 0.1
ENOUGH_S = 600.0
REPLICA_KILLED, SHARD_GONE = "replica-killed", "shard-gone"
SLOW_NETWORK, STALLED_SERVER = "slow-network", "stalled-server"
ROLLOUT, RESHARDING = "rollout", "reshard"
SCENARIOS = {
    REPLICA_KILLED: "one of the servers of shard 0 is killed, then restarted",
    SHARD_GONE: "all servers of shard 0 are killed, then restarted",
    SLOW_NETWORK: "every round trip takes 20 ms longer",
    STALLED_SERVER: "a server of shard 0 stops, then continues",
    ROLLOUT: "a model is rolled out to half of the load, taken back, then rolled out completely",
    RESHARDING: "the model is sharded for one more server, which is added, then removed",
}
# Scenarios whose moves come after a quarter, half and three quarters of the run.
MOVING = {ROLLOUT: (SHARE, UNDO, ROLL_OUT), RESHARDING: (RESHARD, GROW, SHRINK)}
SLOW_MS = 10.0  # milliseconds each way
LATE_S = 60.0  # seconds by which faults may be late at the end of a run; a move has its own limit
# If this process cannot kill or stop the servers, the network in front of them fails instead.
ON_THE_WAY = {"kill": "drop", "start": "heal", "stop": "partition", "continue": "heal"}
OF_PROCESSES = ("kill", "stop", "continue")


def scenario(
    name: str, shards: Sequence[int | None], seconds: float, window_s: float, *, own: bool
) -> list[tuple[float, Command]]:
    """The commands of a shipped scenario: faults come after a third of the run, at the start of a
    window, and are healed after another third.

    Args    shards  shard of each server
            own     whether the run started the servers, and so can kill and restart them
    Raises  ConfigError  the scenario kills a replica, but there is none
    """
    begin_s, end_s = (max(round(seconds * k / 3 / window_s), k) * window_s for k in (1, 2))
    first = min((shard for shard in shards if shard is not None), default=0)
    of_first = [at for at, shard in enumerate(shards) if shard in (first, None)]
    if name == REPLICA_KILLED and len(of_first) < 2:
        raise ConfigError(
            f"{name} needs two servers of shard {first}, found {len(of_first)}; use --replicas 2, "
            "or a cluster that has replicas"
        )
    verb, back, value, servers = {
        REPLICA_KILLED: ("kill", "start", None, of_first[:1]),
        SHARD_GONE: ("kill", "start", None, of_first),
        SLOW_NETWORK: ("slow", "heal", SLOW_MS, list(range(len(shards)))),
        STALLED_SERVER: ("stop", "continue", None, of_first[:1]),
    }[name]
    if not own:
        verb, back = ON_THE_WAY.get(verb, verb), ON_THE_WAY.get(back, back)
        value = 1.0 if verb == "drop" else value
    return [
        *((begin_s, Command(verb, at, value)) for at in servers),
        *((end_s, Command(back, at)) for at in servers),
    ]


def moves(name: str, seconds: float, window_s: float) -> list[tuple[float, Move]]:
    """The moves of a scenario, at the start of windows."""
    return [
        (max(round(seconds * k / 4 / window_s), k) * window_s, Move(verb))
        for k, verb in enumerate(MOVING[name], 1)
    ]


def check_named(text: str) -> None:
    if text not in SCENARIOS and not Path(text).is_file():
        raise ConfigError(
            f"--faults {text} is neither a file nor a scenario; scenarios: {', '.join(SCENARIOS)}"
        )


def read_plan(
    text: str, cluster: Path, seconds: float, window_s: float, *, own: bool
) -> list[tuple[float, Command]]:
    """Reads the faults of a run: `text` names a scenario or a file of lines `at SECONDS command`,
    in seconds since the measuring began.

    Raises  ConfigError  `text` is neither; a command cannot be carried out, or is after the end
    """
    check_named(text)
    endpoints = ClusterToml(cluster).servers()
    if text in SCENARIOS:
        plan = scenario(text, [one.shard for one in endpoints], seconds, window_s, own=own)
    else:
        plan = read_script(Path(text).read_text(encoding="utf-8"), len(endpoints), Path(text))
    if not plan:
        raise ConfigError(f"{text} lists no faults; expected lines like `at SECONDS command`")
    for at_s, command in plan:
        if at_s >= seconds:
            raise ConfigError(
                f"{text} has `{command}` at {at_s:g} s, but the run ends at {seconds:g} s; use a "
                "longer --duration, or an earlier time"
            )
        if command.verb == "start" and not own:
            raise ConfigError(
                f"{text}: `{command}`: a load test restarts only servers that it started "
                "itself; otherwise use `dlm cluster --restart`"
            )
        if command.verb in OF_PROCESSES and command.server is not None:
            server_pid(endpoints[command.server], cluster)
    return plan


@dataclass(frozen=True, slots=True)
class Move:
    """A move; `verb` is one of `MOVES`."""

    verb: str

    def __str__(self) -> str:
        return self.verb


Plan = Sequence[tuple[float, Command | Move]]


class Moves:
    """Carries out moves, one after another; each call returns when the move has ended.

    Args  own    servers of this run, which follow a list of shard sets
          new    folder of the shard set that is rolled out, or that `dlm reshard` makes
          ended  once it is set, the current move is ended
    """

    def __init__(self, own: LocalServers, new: Path, ended: threading.Event) -> None:
        assert own.sets is not None
        self._own, self._new, self._sets, self._ended = own, new, own.sets, ended
        self._sharing: subprocess.Popen[str] | None = None
        self._more: list[Server] = []

    def do(self, move: Move) -> str:
        """Carries out a move, and describes it; raises `DlmError`, with a command's output, if the
        command failed."""
        begun = time.monotonic()
        {
            SHARE: self._share,
            UNDO: self._undo,
            ROLL_OUT: lambda: self._roll_out(self._new),
            RESHARD: self._reshard,
            GROW: self._grow,
            SHRINK: self._shrink,
        }[move.verb]()
        return f"{move}: {MOVES[move.verb]} (took {time.monotonic() - begun:.1f} s)"

    def close(self) -> None:
        self._end_sharing()
        stop([one.process for one in self._more])

    # ------------------------------------------------------------------ a roll-out

    def _share(self) -> None:
        self._sharing = self._begin("rollout", os.fspath(self._new), *SHARED, *RULES)
        until = time.monotonic() + ENOUGH_S
        while time.monotonic() < until and not self._ended.is_set():
            if (found := ClusterToml(self._own.cluster).rollout()) and found.share > 0:
                return
            if self._sharing.poll() is not None:
                self._check(self._sharing)
            time.sleep(LOOK_S)
        raise DlmError(
            f"no share of the load went to the new shard set within {ENOUGH_S:g} s of the roll-out"
        )

    def _undo(self) -> None:
        self._end_sharing()
        self._run("rollout", "--undo", *RULES)

    def _roll_out(self, folder: Path) -> None:
        self._run("rollout", os.fspath(folder), *WHOLE, *RULES)

    def _end_sharing(self) -> None:
        if self._sharing is not None:
            self._sharing.terminate()
            self._sharing.communicate()
            self._sharing = None

    # ---------------------------------------------------- another number of shards

    def _reshard(self) -> None:
        shards = str(read_manifest(self._own.folder).shards + 1)
        line = (os.fspath(self._own.folder), "--shards", shards, "--output", os.fspath(self._new))
        self._run("reshard", *line, "--quiet", cluster=False)

    def _grow(self) -> None:
        """As in dlm/cluster/README.md, extends the list, then adds servers, then tells clients."""
        own, added = self._own, read_manifest(self._own.folder).shards
        write_sets(self._sets, [*read_sets(self._sets), self._new])
        for number, _ in enumerate([one for one in own.servers if one.endpoint.shard == 0]):
            ready = own.cluster.with_name(f"server-{added}-{number}.json")
            self._more.append(own.servers[0].beside(added, ready))
        self._list([*own.servers, *self._more])
        self._roll_out(self._new)

    def _shrink(self) -> None:
        self._roll_out(self._own.folder)
        self._list(self._own.servers)
        stop([one.process for one in self._more])
        self._more = []

    def _list(self, servers: Sequence[Server]) -> None:
        replace_servers(self._own.cluster, lambda _: [one.endpoint for one in servers])

    # ------------------------------------------------------------------- commands

    def _begin(self, *words: str, cluster: bool = True) -> subprocess.Popen[str]:
        more = ("--cluster", os.fspath(self._own.cluster)) if cluster else ()
        return subprocess.Popen(
            command_of_child("dlm.cli.main", *words, *more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _run(self, *words: str, cluster: bool = True) -> None:
        process = self._begin(*words, cluster=cluster)
        try:
            self._check(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _check(self, process: subprocess.Popen[str]) -> None:
        until, said = time.monotonic() + ENOUGH_S, ""
        while process.returncode is None:
            if self._ended.is_set() or time.monotonic() > until:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=LOOK_S)
        if process.returncode != 0:
            raise DlmError(
                f"the roll-out ended with status {process.returncode}: {said.strip()[-500:]}"
            )


class Faults:
    """Carries out a plan. Clients that use the cluster.toml `through` see its faults.

    Args  ended  set by `close`: the current command then ends
    """

    def __init__(
        self,
        plan: Plan,
        through: Path,
        chaos: Chaos | Moves,
        ended: threading.Event | None = None,
    ) -> None:
        self.through = through
        self.last_s = plan[-1][0]  # when the last command is due
        self._plan = plan
        self._chaos = chaos
        self._ended = ended or threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, start: float, put: Callable[[Record], None]) -> None:
        """Carries out the plan in a separate thread.

        Args  start  time 0, by `time.monotonic`;  put  gets each command's record, in that thread
        """
        self._thread = threading.Thread(
            target=self._run, args=(start, put), name="loadtest-faults", daemon=True
        )
        self._thread.start()

    def _run(self, start: float, put: Callable[[Record], None]) -> None:
        for at_s, command in self._plan:
            if self._ended.wait(max(start + at_s - time.monotonic(), 0.0)):
                return
            begun_s = time.monotonic() - start
            try:
                what = self._chaos.do(command)  # type: ignore[arg-type]
            except (DlmError, OSError) as exc:
                what = f"{command}: {exc}"  # a missing server is no reason to stop
            if not isinstance(command, Move):
                put({"type": "fault", "at_s": at_s, "command": str(command), "what": what})
                continue
            # A move gets two records: its beginning, which an earlier move may delay, and its end.
            for when_s, name in (
                (begun_s if begun_s > at_s + 1.0 else at_s, str(command)),
                (time.monotonic() - start, f"{command} ended"),
            ):
                put({"type": "fault", "at_s": when_s, "command": name, "what": what})
        self._done.set()
        # A server ends with the thread that started it (prctl(2), PR_SET_PDEATHSIG).
        self._ended.wait()

    def wait(self) -> None:
        """Waits until the last command is carried out, which may be late on a busy machine."""
        limits = (ENOUGH_S for _, command in self._plan if isinstance(command, Move))
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends only this wait; the load is over
            self._done.wait(sum(limits, LATE_S))

    def close(self) -> None:
        """Heals the network, and lets stopped servers continue."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._chaos.close()


@contextmanager
def moving(
    name: str, own: LocalServers, new: Path, seconds: float, window_s: float
) -> Iterator[Faults]:
    """Prepares a scenario of `MOVING`, which ends with the block at the latest.

    Args  new  the shard set that is rolled out, or the folder of the one that `dlm reshard` makes
    """
    ended = threading.Event()
    carried = Moves(own, new, ended)
    with contextlib.closing(
        Faults(moves(name, seconds, window_s), own.cluster, carried, ended)
    ) as found:
        yield found


@contextmanager
def faults(
    plan: Plan, cluster: Path, seed: int, start: Callable[[int], None] | None = None
) -> Iterator[Faults]:
    """Puts proxies in front of the servers of `cluster`, until the end of the block.

    Args  seed   seed of random choices
          start  starts a server again, by its index, if this process started it
    """
    endpoints = ClusterToml(cluster).servers()
    with (
        scratch_folder(None, "dlm-faults") as scratch,
        Proxies([endpoint.address for endpoint in endpoints], seed) as proxies,
    ):
        through = scratch / "through.toml"
        write_through(through, cluster, proxies.addresses)
        chaos = Chaos(cluster, endpoints, proxies, start)
        with contextlib.closing(Faults(plan, through, chaos)) as found:
            yield found
