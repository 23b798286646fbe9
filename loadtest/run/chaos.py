"""Breaks servers on purpose: commands, plans of commands, and their execution."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlm.client.cluster_file import ClusterToml, Endpoint, write_cluster_file
from dlm.errors import ConfigError
from loadtest.run.proxy import Faults, Proxies

# verb -> what follows the server's number
VERBS = {
    "kill": "",
    "start": "",
    "stop": "",
    "continue": "",
    "slow": "MS",
    "stall": "P",
    "drop": "[P]",
    "partition": "",
    "blackhole": "",
    "half-open": "",
    "corrupt": "P",
    "heal": "",
}
# The random faults and their values.
RANDOM: dict[str, tuple[float, ...]] = {
    "kill": (),
    "stop": (),
    "slow": (5, 20, 100, 500),
    "stall": (0.01, 0.1),
    "drop": (0.01, 0.5, 1.0),
    "partition": (),
    "blackhole": (),
    "half-open": (),
    "corrupt": (0.01, 0.2),
}
# A process that waits until its input ends, and then sends SIGCONT to the process groups that the
# input names.
GUARD = """
import os, signal, sys
for line in sys.stdin.read().split():
    try:
        os.killpg(int(line), signal.SIGCONT)
    except OSError:
        pass
"""
HELP = "; ".join([*(f"{verb} N {more}".strip() for verb, more in VERBS.items()), "heal all; list"])


@dataclass(frozen=True, slots=True)
class Command:
    """A command that breaks, heals, restarts or lists servers.

    server  index in cluster.toml, from 0, or None for all;  value  milliseconds, or a probability
    """

    verb: str
    server: int | None = None
    value: float | None = None

    def __str__(self) -> str:
        if self.verb == "list":
            return self.verb
        what = f"{self.verb} {'all' if self.server is None else self.server}"
        return what if self.value is None else f"{what} {self.value:g}"


def parse(line: str, servers: int) -> Command:
    """Parses a command; ConfigError if it is not one, or its server is not below `servers`."""
    verb, *rest = line.split()
    if verb == "list" and not rest:
        return Command(verb)
    if verb not in VERBS:
        raise ConfigError(f"{line.strip()!r} is not a command; expected one of: {HELP}")
    more = VERBS[verb]
    if not rest:
        whole = ", or heal all" if verb == "heal" else ""
        wanted = f"{verb} N {more}".strip()
        raise ConfigError(
            f"{line.strip()!r} does not name a server; expected {wanted}{whole}, with N from 0 to "
            f"{servers - 1}"
        )
    place, *values = rest
    if verb == "heal" and place == "all" and not values:
        return Command(verb)
    if not place.isdecimal() or int(place) >= servers:
        raise ConfigError(f"{line.strip()!r}: servers are 0 to {servers - 1}, found {place!r}")
    most = 60_000.0 if more == "MS" else 1.0
    if not values and more in ("", "[P]"):
        return Command(verb, int(place), 1.0 if more else None)
    try:
        (value,) = map(float, values)
        if not more or not 0 <= value <= most:
            raise ValueError
    except ValueError:
        wanted = f"{more.strip('[]')}, a number from 0 to {most:g}" if more else "nothing"
        raise ConfigError(f"{line.strip()!r}: expected {wanted} after the server") from None
    return Command(verb, int(place), value)


def read_script(text: str, servers: int, path: Path) -> list[tuple[float, Command]]:
    """Reads a script's lines ``at SECONDS command``, sorted by time; ConfigError for any other."""
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"at\s+([0-9]+(?:\.[0-9]+)?)\s+(.+)", line)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: expected `at SECONDS command`, found {line!r}"
            )
        try:
            out.append((float(found[1]), parse(found[2], servers)))
        except ConfigError as exc:
            exc.add_note(f"in {path}, line {number}")
            raise
    return sorted(out, key=lambda one: one[0])


def random_faults(
    seed: int, seconds: float, servers: int, *, kill: bool
) -> list[tuple[float, Command]]:
    """Faults at random times, in order: one at a time per server, healed after a while.

    Args  kill  whether to kill servers too; another program must then restart them
    """
    out: list[tuple[float, Command]] = []
    for server in range(servers):
        chance, now = random.Random(f"{seed}/{server}"), 0.0
        while (now := now + chance.uniform(0.5, 5.0)) < seconds:
            verb = chance.choice([verb for verb in RANDOM if kill or verb != "kill"])
            values = RANDOM[verb]
            out.append((now, Command(verb, server, chance.choice(values) if values else None)))
            now = min(now + chance.uniform(0.2, 5.0), seconds)
            if verb != "kill":
                back = "continue" if verb == "stop" else "heal"
                out.append((now, Command(back, server)))
    return [*sorted(out, key=lambda one: one[0]), (seconds, Command("heal"))]


class Chaos:
    """Carries commands out.

    Args  cluster  cluster.toml of the servers; it is read again for the pid of a restarted server
          start    restarts a killed server, by its index; None if that is left to others
    """

    def __init__(
        self,
        cluster: Path,
        endpoints: Sequence[Endpoint],
        proxies: Proxies,
        start: Callable[[int], None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._start = start
        self._endpoints = endpoints
        self._proxies = proxies
        self._stopped: set[int] = set()  # pids
        self._guard: subprocess.Popen[bytes] | None = None

    def do(self, command: Command) -> str:
        """Carries out a command; returns what was done. ConfigError if the server is not on this
        machine."""
        verb, at, value = command.verb, command.server, command.value
        if verb == "list":
            return "list\n" + "\n".join(map(self._row, range(len(self._endpoints))))
        if at is None:
            for one in range(len(self._endpoints)):
                self._proxies.heal(one)
            return str(command)
        told = f"{command}: shard {self._endpoints[at].shard} at {self._endpoints[at].address}"
        if verb in ("kill", "stop", "continue"):
            pid = self._pid(at)
            if verb == "kill":
                os.killpg(pid, signal.SIGKILL)
            elif verb == "stop":
                self._watch_over(pid)
                os.killpg(pid, signal.SIGSTOP)
                self._stopped.add(pid)
            else:
                os.killpg(pid, signal.SIGCONT)
                self._stopped.discard(pid)
            return f"{told}, pid {pid}"
        if verb == "start":
            if self._start is None:
                raise ConfigError(
                    f"{command}: only a load test that started the servers itself can restart "
                    "them; otherwise use `dlm cluster --restart`"
                )
            self._start(at)
        elif verb == "heal":
            self._proxies.heal(at)
        elif verb == "half-open":
            return f"{told}, {self._proxies.half_open(at)} connections"
        elif verb == "slow":
            self._proxies.set(at, delay_s=(value or 0.0) / 1000)
        else:
            self._proxies.set(at, **{verb: True if value is None else value})
        return told

    def _watch_over(self, pid: int) -> None:
        """Makes stopped servers, which ignore SIGTERM, continue if this process ends in any way."""
        if self._guard is None:
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True
            )
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"%d\n" % pid)
        self._guard.stdin.flush()

    def _pid(self, at: int) -> int:
        address = self._endpoints[at].address
        for endpoint in ClusterToml(self._cluster).servers():
            if endpoint.address == address:
                return server_pid(endpoint, self._cluster)
        raise ConfigError(f"{self._cluster} no longer lists {address}; start chaos again")

    def _row(self, at: int) -> str:
        endpoint, faults = self._endpoints[at], self._proxies.faults(at)
        wrong = [
            f"{name} {getattr(faults, name):g}"
            for name in Faults.__slots__
            if getattr(faults, name) != getattr(Faults(), name)
        ]
        try:
            pid = self._pid(at)
            state = f"pid {pid}" + (", stopped" if pid in self._stopped else "")
        except ConfigError:
            state = "gone"
        return (
            f"  {at}  shard {endpoint.shard}  {self._proxies.addresses[at]} -> {endpoint.address}  "
            f"{state}  {', '.join(wrong) or 'ok'}"
        )

    def close(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGCONT)
        if self._guard is not None:
            self._guard.communicate()


def write_through(through: Path, cluster: Path, addresses: Sequence[str]) -> None:
    """Writes a cluster.toml with the servers of `cluster`, in order, at other addresses."""
    toml = ClusterToml(cluster)
    write_cluster_file(
        through,
        [Endpoint(new, one.shard) for new, one in zip(addresses, toml.servers(), strict=True)],
        security=toml.security(),
        local_fallback=toml.local_fallback(),
        model=toml.model(),
    )


def server_pid(endpoint: Endpoint, cluster: Path) -> int:
    """The process of a server, which leads a process group.

    Raises  ConfigError  the server has exited, or `dlm cluster` did not start it on this machine
    """
    host = endpoint.address.rsplit(":", 1)[0]
    if endpoint.pid is None or not (host == "localhost" or host.startswith("127.")):
        raise ConfigError(
            f"{cluster} gives no process for {endpoint.address} on this machine; chaos breaks only "
            "clusters that `dlm cluster` started here"
        )
    try:
        words = Path(f"/proc/{endpoint.pid}/cmdline").read_bytes().split(b"\0")
        # By now, another program may have this process id, and may also be a server.
        ours = {b"dlm.cli.main", b"serve"} <= set(words)
        alive = ours and os.getpgid(endpoint.pid) == endpoint.pid
    except (FileNotFoundError, ProcessLookupError):
        alive = False
    if not alive:
        raise ConfigError(
            f"the server at {endpoint.address} (process {endpoint.pid}) has exited; name another "
            "server, or start the cluster again"
        )
    return endpoint.pid
