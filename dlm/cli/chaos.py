"""`dlm chaos`: breaks a cluster of this machine on purpose, to see what its clients do then."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.errors import ConfigError

if TYPE_CHECKING:
    from dlm.cli.proxy import Proxies
    from dlm.client.topology import Endpoint

# verb -> what follows the server
VERBS = {
    "kill": "",
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
# What random faults are chosen among, and their values.
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
HELP = "; ".join(f"{verb} N {more}".strip() for verb, more in VERBS.items()) + "; list"


@dataclass(frozen=True, slots=True)
class Command:
    """A line of what is to be done.

    server  place in cluster.toml, from 0; None for all
    value   milliseconds, or a probability
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
    """The command in a line.

    Raises  ConfigError  it is none, or `servers` has no such server
    """
    verb, *rest = line.split()
    if verb == "list" and not rest:
        return Command(verb)
    if verb not in VERBS:
        raise ConfigError(f"{line.strip()!r} is no command; there are: {HELP}")
    more = VERBS[verb]
    if not rest:
        whole = ", or heal all" if verb == "heal" else ""
        wanted = f"{verb} N {more}".strip()
        raise ConfigError(
            f"{line.strip()!r} does not say which server: {wanted}{whole}, with N from 0 to "
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
        (text,) = values
        value = float(text)
        if not more or not 0 <= value <= most:
            raise ValueError
    except ValueError:
        wanted = f"{more.strip('[]')}, a number from 0 to {most:g}" if more else "nothing"
        raise ConfigError(f"{line.strip()!r}: after the server, {wanted} is expected") from None
    return Command(verb, int(place), value)


def read_script(text: str, servers: int, path: Path) -> list[tuple[float, Command]]:
    """The lines ``at SECONDS command`` of a script, in the order of their times.

    Raises  ConfigError  a line is something else; empty lines and those after # are left out
    """
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"at\s+([0-9]+(?:\.[0-9]+)?)\s+(.+)", line)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: `at SECONDS command` expected, found {line!r}"
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
    """Faults at random times, in their order: of each server one at a time, taken back after a
    while; at the end everything is well.

    Args
        kill  servers as well: who does that must know that they are started again
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

    Args
        cluster  cluster.toml of the servers; read again for the pid of one that was started again
    """

    def __init__(self, cluster: Path, endpoints: Sequence[Endpoint], proxies: Proxies) -> None:
        self._cluster = cluster
        self._endpoints = endpoints
        self._proxies = proxies
        self._stopped: set[int] = set()  # pids

    def do(self, command: Command) -> str:
        """Does it, and says what was done.

        Raises  ConfigError  the server is not there, or is none of this machine's
        """
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
                os.killpg(pid, signal.SIGSTOP)
                self._stopped.add(pid)
            else:
                os.killpg(pid, signal.SIGCONT)
                self._stopped.discard(pid)
            return f"{told}, pid {pid}"
        if verb == "heal":
            self._proxies.heal(at)
        elif verb == "half-open":
            return f"{told}, {self._proxies.half_open(at)} connections"
        elif verb == "slow":
            self._proxies.set(at, delay_s=(value or 0.0) / 1000)
        else:
            self._proxies.set(at, **{verb: True if value is None else value})
        return told

    def _pid(self, at: int) -> int:
        from dlm.client.topology import read_cluster_file

        address = self._endpoints[at].address
        for endpoint in read_cluster_file(self._cluster):
            if endpoint.address == address:
                return server_pid(endpoint, self._cluster)
        raise ConfigError(f"{self._cluster} names {address} no more")

    def _row(self, at: int) -> str:
        from dlm.cli.proxy import Faults

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
            f"{state}  {', '.join(wrong) or 'well'}"
        )

    def close(self) -> None:
        """Lets go on what was stopped."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGCONT)


def server_pid(endpoint: Endpoint, cluster: Path) -> int:
    """The process of a server, which leads a group of its own.

    Raises  ConfigError  it is no server that `dlm cluster` started on this machine, or it is gone
    """
    host = endpoint.address.rsplit(":", 1)[0]
    if endpoint.pid is None or not (host == "localhost" or host.startswith("127.")):
        raise ConfigError(
            f"{cluster} gives no process for {endpoint.address}: dlm chaos breaks clusters that "
            "`dlm cluster` started on this machine, and no others"
        )
    try:
        words = Path(f"/proc/{endpoint.pid}/cmdline").read_bytes().split(b"\0")
        # Another program may have its number by now, and may serve, too.
        ours = {b"dlm.cli.main", b"serve"} <= set(words)
        alive = ours and os.getpgid(endpoint.pid) == endpoint.pid
    except (FileNotFoundError, ProcessLookupError):
        alive = False
    if not alive:
        raise ConfigError(
            f"the server at {endpoint.address} is gone: pid {endpoint.pid} is no more"
        )
    return endpoint.pid


def chaos(
    cluster: Annotated[Path, typer.Argument(help="cluster.toml of a running `dlm cluster`.")],
    through: Annotated[
        Path, typer.Option(help="File to write: the same servers, by way of what breaks.")
    ] = Path("chaos.toml"),
    script: Annotated[
        Path | None, typer.Option(help="File of lines `at SECONDS command`; ends with the last.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--random", help="Seed of random faults, for --minutes.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of --random.")] = 1.0,
    kill: Annotated[
        bool, typer.Option("--kill", help="--random kills too; for `dlm cluster --restart`.")
    ] = False,
) -> None:
    """Break a local cluster on purpose, by commands on standard input.

    Give the clients that are to see it --through's file. Commands, a line each, where N is a
    server's place in cluster.toml: kill N, stop N, continue N; slow N MS, stall N P, drop N [P],
    partition N, blackhole N, half-open N, corrupt N P, heal N|all; list. Ends with the script or
    the minutes, else with standard input (or Ctrl-C), and takes everything back but a kill.

    Example: dlm chaos cluster.toml --through chaos.toml
    """
    from dlm.cli.cluster import check_free
    from dlm.cli.proxy import Proxies
    from dlm.client.security import read_cluster_security
    from dlm.client.topology import (
        WRITTEN_BY,
        Endpoint,
        read_cluster_file,
        read_cluster_small,
        write_cluster_file,
    )

    if kill and seed is None:
        raise ConfigError("--kill is of --random; give --random SEED, or type: kill N")
    if seed is not None and script is not None:
        raise ConfigError("--random and --script are two plans; give one of them")
    endpoints = read_cluster_file(cluster)
    if not cluster.read_text(encoding="utf-8").startswith(WRITTEN_BY):
        raise ConfigError(
            f"{cluster} was not written by dlm cluster; dlm chaos breaks nothing but clusters that "
            "it started on this machine"
        )
    for endpoint in endpoints:
        server_pid(endpoint, cluster)
    plan = []
    if script is not None:
        plan = read_script(script.read_text(encoding="utf-8"), len(endpoints), script)
    if seed is not None:
        if not 0 < minutes <= 10_000:
            raise ConfigError(f"--minutes {minutes:g}: above 0 is expected, 10000 at most")
        plan = random_faults(seed, minutes * 60, len(endpoints), kill=kill)
    if through.absolute() == cluster.absolute():
        raise ConfigError(f"--through {through} is the cluster's own file; give another name")
    check_free(through)

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    with Proxies([e.address for e in endpoints], seed or 0) as proxies:
        chaos = Chaos(cluster, endpoints, proxies)
        written = None
        try:
            write_cluster_file(
                through,
                [
                    Endpoint(address, endpoint.shard)
                    for address, endpoint in zip(proxies.addresses, endpoints, strict=True)
                ],
                shard_set=re.findall(r"[0-9a-f]{32}|$", cluster.read_text(encoding="utf-8"))[0],
                security=read_cluster_security(cluster),
                small=read_cluster_small(cluster),
            )
            written = through.read_text()
            print(f"wrote {through}: {len(endpoints)} servers, by way of this process", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                _run(chaos, plan, len(endpoints), ends_with_input=script is None and seed is None)
        finally:
            chaos.close()
            if written is not None and through.exists() and through.read_text() == written:
                through.unlink()
            signal.signal(signal.SIGTERM, previous)
    print("stopped; what was held goes on", file=sys.stderr)


def _run(
    chaos: Chaos, plan: Sequence[tuple[float, Command]], servers: int, *, ends_with_input: bool
) -> None:
    """The plan at its times, and the lines of standard input as they come."""
    begun = time.monotonic()
    waiting = list(reversed(plan))
    listening, typed = sys.stdin is not None, b""
    while waiting or (listening and ends_with_input):
        left_s = max(waiting[-1][0] - (time.monotonic() - begun), 0.0) if waiting else None
        # No thread that reads: one that does so while Python ends takes it down.
        if not select.select([0] if listening else [], [], [], left_s)[0]:
            _do(chaos, waiting.pop()[1])
            continue
        data = os.read(0, 65536)
        listening = bool(data)
        *lines, typed = (typed + data + b"\n" * (not data)).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            if not text.strip():
                continue
            try:
                command = parse(text, servers)
            except ConfigError as exc:
                print(f"dlm: {exc}", file=sys.stderr, flush=True)
            else:
                _do(chaos, command)


def _do(chaos: Chaos, command: Command) -> None:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    try:
        print(f"{at} {chaos.do(command)}", flush=True)
    except (ConfigError, ProcessLookupError) as exc:
        # One that is gone is no reason to stop; a script may say so by design.
        print(f"{at} {command}: {exc}", flush=True)
