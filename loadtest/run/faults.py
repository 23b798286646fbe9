"""What breaks during a load test: shipped scenarios, plans from files, and who carries them out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dlm.client.cluster_file import ClusterToml
from dlm.errors import ConfigError, DlmError
from dlm.files import scratch_folder
from loadtest.run.chaos import Chaos, Command, read_script, server_pid, write_through
from loadtest.run.local_cluster import LocalServers
from loadtest.run.moving import (
    ENOUGH_S,
    GROW,
    RESHARD,
    ROLL_OUT,
    SHARE,
    SHRINK,
    UNDO,
    Move,
    Moves,
)
from loadtest.run.proxy import Proxies
from loadtest.run.replay import Record

REPLICA_KILLED, SHARD_GONE = "replica-killed", "shard-gone"
SLOW_NETWORK, STALLED_SERVER = "slow-network", "stalled-server"
ROLLOUT, RESHARDING = "rollout", "reshard"
SCENARIOS = {
    REPLICA_KILLED: "one of the servers of shard 0 is killed, then restarted",
    SHARD_GONE: "all servers of shard 0 are killed, then restarted",
    SLOW_NETWORK: "every round trip takes 20 ms longer",
    STALLED_SERVER: "a server of shard 0 stops, then continues",
    ROLLOUT: "a model is rolled out by half and taken back, then rolled out whole",
    RESHARDING: "the model is sharded for one server more, which comes, and goes again",
}
# Those that move a model or servers, each at a further quarter of the run.
MOVING = {ROLLOUT: (SHARE, UNDO, ROLL_OUT), RESHARDING: (RESHARD, GROW, SHRINK)}
SLOW_MS = 10.0  # each way
LATE_S = 60.0  # that faults may be late at the end of a run; a move has its own limit
# In front of servers that this process cannot kill or stop, the network fails in their place.
ON_THE_WAY = {"kill": "drop", "start": "heal", "stop": "partition", "continue": "heal"}
OF_PROCESSES = ("kill", "stop", "continue")
Plan = Sequence[tuple[float, Command | Move]]


def scenario(
    name: str, shards: Sequence[int | None], seconds: float, window_s: float, *, own: bool
) -> list[tuple[float, Command]]:
    """The commands of a shipped scenario: faults come a third into the run, at the begin of a
    window, and are taken back after another third.

    Args    shards  of each server
            own     the run started the servers, so it can kill and start them
    Raises  ConfigError  a replica is to be killed where there is none
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
    """The moves of a scenario, at the begin of windows."""
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
    """The faults of a run: a scenario by its name, or a file of lines `at SECONDS command`, in
    seconds since the measuring began.

    Raises  ConfigError  it is neither; a command that cannot be carried out, or comes after the end
    """
    check_named(text)
    endpoints = ClusterToml(cluster).servers()
    if text in SCENARIOS:
        plan = scenario(text, [one.shard for one in endpoints], seconds, window_s, own=own)
    else:
        plan = read_script(Path(text).read_text(encoding="utf-8"), len(endpoints), Path(text))
    if not plan:
        raise ConfigError(f"{text} has no faults; expected lines `at SECONDS command`")
    for at_s, command in plan:
        if at_s >= seconds:
            raise ConfigError(
                f"{text}: `{command}` at {at_s:g} s, but the run ends at {seconds:g} s; use a "
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


class Faults:
    """A plan, and what carries it out. Clients see what breaks through the file `through`.

    Args  ended  set by `close`: whatever goes on then ends
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
        """Carries the plan out in a thread of its own.

        Args  start  time 0, by `time.monotonic`;  put  takes a record of each command, in there
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
                what = f"{command}: {exc}"  # a server that is gone is no reason to stop
            if not isinstance(command, Move):
                put({"type": "fault", "at_s": at_s, "command": str(command), "what": what})
                continue
            # The one before may have taken longer than planned; and its end is of interest, too.
            for when_s, name in (
                (begun_s if begun_s > at_s + 1.0 else at_s, str(command)),
                (time.monotonic() - start, f"{command} ended"),
            ):
                put({"type": "fault", "at_s": when_s, "command": name, "what": what})
        self._done.set()
        # A server ends with the thread that started it (prctl(2), PR_SET_PDEATHSIG).
        self._ended.wait()

    def wait(self) -> None:
        """Until the last command is carried out: on a busy machine, late; a move, later."""
        limits = (ENOUGH_S for _, command in self._plan if isinstance(command, Move))
        with contextlib.suppress(KeyboardInterrupt):  # the load has ended: the report comes
            self._done.wait(sum(limits, LATE_S))

    def close(self) -> None:
        """Takes back what the network does, and lets stopped servers go on."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._chaos.close()


@contextmanager
def moving(
    name: str, own: LocalServers, new: Path, seconds: float, window_s: float
) -> Iterator[Faults]:
    """A scenario of `MOVING`, until the end of the block.

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
    """Proxies before the servers of `cluster`, until the end of the block.

    Args  seed   of what is left to chance
          start  starts a server again, by its place, where this process started it
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
