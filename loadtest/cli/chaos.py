"""`python -m loadtest chaos`: breaks a local cluster on purpose, to see what clients do then."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.errors import ConfigError
from dlm.units import counted

if TYPE_CHECKING:
    from loadtest.run.chaos import Chaos, Command


def chaos(
    cluster: Annotated[Path, typer.Argument(help="cluster.toml of a running `dlm cluster`.")],
    through: Annotated[
        Path,
        typer.Option(help="cluster.toml to write: the same servers, reached through the faults."),
    ] = Path("chaos.toml"),
    script: Annotated[
        Path | None,
        typer.Option(help="File of lines `at SECONDS command`; chaos ends after the last command."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--random", help="Seed of random faults, for --minutes.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Duration of --random, in minutes.")] = 1.0,
    kill: Annotated[
        bool,
        typer.Option(
            "--kill", help="Let --random also kill servers; use it with `dlm cluster --restart`."
        ),
    ] = False,
) -> None:
    """Break a local cluster on purpose, by commands on standard input.

    Give the file of --through to clients that should see the faults. Commands, one per line, where
    N is a server's place in cluster.toml: kill N, stop N, continue N; slow N MS, stall N P, drop N
    [P], partition N, blackhole N, half-open N, corrupt N P, heal N|all; list. Chaos ends after
    --script or --random, else at the end of the input, or on Ctrl-C. It heals all except kills.

    Example: python -m loadtest chaos cluster.toml --through chaos.toml
    """
    from dlm.client.cluster_file import WRITTEN_BY, ClusterToml
    from dlm.cluster.processes import claim
    from loadtest.run.chaos import Chaos, random_faults, read_script, server_pid, write_through
    from loadtest.run.proxy import Proxies

    if kill and seed is None:
        raise ConfigError(
            "--kill needs --random; give --random SEED, or type the command kill N when chaos runs"
        )
    if seed is not None and script is not None:
        raise ConfigError("--random and --script were both given; expected only one of them")
    endpoints = ClusterToml(cluster).servers()
    if not cluster.read_text(encoding="utf-8").startswith(WRITTEN_BY):
        raise ConfigError(
            f"{cluster} was not written by dlm cluster; chaos breaks only clusters that "
            "`dlm cluster` started on this machine"
        )
    for endpoint in endpoints:
        server_pid(endpoint, cluster)
    plan = []
    if script is not None:
        plan = read_script(script.read_text(encoding="utf-8"), len(endpoints), script)
    if seed is not None:
        if not 0 < minutes <= 10_000:
            raise ConfigError(f"--minutes is {minutes:g}; expected a number above 0, up to 10000")
        plan = random_faults(seed, minutes * 60, len(endpoints), kill=kill)
    if through.absolute() == cluster.absolute():
        raise ConfigError(f"--through {through} is the cluster's own file; choose another name")
    addresses = [endpoint.address for endpoint in endpoints]
    with claim(through), Proxies(addresses, seed or 0) as proxies:
        chaos = Chaos(cluster, endpoints, proxies)
        written = None
        try:
            write_through(through, cluster, proxies.addresses)
            written = through.read_text()
            print(
                f"wrote {through}: {counted(len(endpoints), 'server')}, through this process",
                flush=True,
            )
            with contextlib.suppress(KeyboardInterrupt):
                _run(chaos, plan, len(endpoints), ends_with_input=script is None and seed is None)
        finally:
            chaos.close()
            if written is not None and through.exists() and through.read_text() == written:
                through.unlink()
    print("stopped; held traffic and stopped servers were released", file=sys.stderr)


def _run(
    chaos: Chaos, plan: Sequence[tuple[float, Command]], servers: int, *, ends_with_input: bool
) -> None:
    """Runs a plan's commands at their times, and lines of standard input as they arrive."""
    from loadtest.run.chaos import parse

    begun = time.monotonic()
    waiting = list(reversed(plan))
    listening, typed = sys.stdin is not None, b""
    while waiting or (listening and ends_with_input):
        left_s = max(waiting[-1][0] - (time.monotonic() - begun), 0.0) if waiting else None
        # No thread reads the input: a thread that reads while Python exits would crash Python.
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
                print(f"loadtest: {exc}", file=sys.stderr, flush=True)
            else:
                _do(chaos, command)


def _do(chaos: Chaos, command: Command) -> None:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    try:
        print(f"{at} {chaos.do(command)}", flush=True)
    except (ConfigError, ProcessLookupError) as exc:
        # A missing server is no reason to stop; a script may kill one by design.
        print(f"{at} {command}: {exc}", flush=True)
