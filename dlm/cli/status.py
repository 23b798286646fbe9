"""`dlm status`: how every server of a cluster is, now or until Ctrl-C."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Group

    from dlm.client.status import ClusterStatus, Look, Row

COLUMNS = (
    "address",
    "shard",
    "state",
    "worker",
    "model",
    "queries/s",
    "messages/s",
    "refused",
    "in flight",
    "CPU %",
    "memory",
    "uptime",
    "round trip",
)
_COLOURS = {"ready": "green", "warming": "yellow", "draining": "yellow"}


def status(
    cluster: Annotated[Path, typer.Option(help="cluster.toml of the servers to ask.")] = Path(
        "cluster.toml"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two heartbeats, which rates are taken from.")
    ] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds that a server has to answer.")] = 2.0,
) -> None:
    """Ask every server how it is; exit status 1 where a shard has no server that is ready.

    Example: dlm status --cluster cluster.toml --watch
    """
    from functools import partial

    from dlm.client.config import ClientConfig
    from dlm.client.security import read_cluster_security
    from dlm.client.status import ClusterStatus
    from dlm.client.topology import read_cluster_file
    from dlm.client.transport import GrpcConnection
    from dlm.errors import ConfigError

    if as_json and watch:
        raise ConfigError("--json and --watch were both given; one of them is expected")
    for name, value in (("interval", interval), ("timeout", timeout)):
        if not 0 < value <= 3600:
            raise ConfigError(f"--{name} {value:g}: seconds above 0 are expected, 3600 at most")
    endpoints = read_cluster_file(cluster)
    security = ClientConfig().security.over(read_cluster_security(cluster))
    connect = partial(GrpcConnection, security=security)
    servers = ClusterStatus(endpoints, connect, timeout)
    pause = threading.Event()  # never set: waiting for it ends at once where a signal comes
    try:
        servers.look()
        if watch:
            _watch(servers, pause, interval)
            return
        pause.wait(interval)
        look = servers.look()
    finally:
        servers.close()
    if as_json:
        print(json.dumps({**look.facts(), "interval_s": interval}, indent=1))
    else:
        _print(look)
    if look.missing:
        raise typer.Exit(1)


def _watch(servers: ClusterStatus, pause: threading.Event, interval: float) -> None:
    from contextlib import suppress

    from rich.console import Console
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(console=Console(), auto_refresh=False) as live:
        while True:
            live.update(shown(servers.look()), refresh=True)
            pause.wait(interval)


def _print(look: Look) -> None:
    import sys

    from rich.console import Console

    # In a pipe nothing is cut off to fit a terminal that is not there.
    Console(width=None if sys.stdout.isatty() else 200).print(shown(look))


def shown(look: Look) -> Group:
    """The table, and below it what is wrong."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in COLUMNS:
        text = column in ("address", "state", "model")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    for row in look.rows:
        cells = cells_of(row)
        colour = _COLOURS.get(row.state, "red")
        table.add_row(*(Text(c, colour if i == 2 else "") for i, c in enumerate(cells)))
    errors = dict.fromkeys(f"{row.address}: {row.error}" for row in look.rows if row.error)
    lines = [Text(error) for error in errors]
    lines += [Text(f"shard {shard}: no server is ready", "red") for shard in look.missing]
    return Group(table, *lines)


def cells_of(row: Row) -> list[str]:
    """The text of each of `COLUMNS`; what is not known is empty."""

    def number(value: float | None, form: str = ",.0f") -> str:
        return "" if value is None else format(value, form)

    worker = "" if row.worker is None else f"{row.worker + 1}/{row.workers}"
    return [
        row.address,
        number(row.shard, "d") or "?",
        row.state,
        worker,
        row.model or "",
        number(row.queries_per_s),
        number(row.messages_per_s),
        number(row.refused),
        number(row.in_flight),
        number(row.cpu_percent),
        "" if row.memory_bytes is None else size(row.memory_bytes),
        "" if row.uptime_s is None else duration(row.uptime_s),
        "" if row.round_trip_ms is None else f"{row.round_trip_ms:.1f} ms",
    ]


def size(count: int) -> str:
    """Bytes as 512 KiB, 36.1 MiB, 2.0 GiB."""
    if count < 1 << 20:
        return f"{count / 1024:.0f} KiB"
    unit, power = ("MiB", 20) if count < 1 << 30 else ("GiB", 30)
    return f"{count / (1 << power):.1f} {unit}"


def duration(seconds: float) -> str:
    """As people say it: 42 s, 3 m 20 s, 5 h 10 m, 12 d 3 h."""
    whole = int(seconds)
    for unit, size, smaller, small in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {smaller}"
    return f"{whole} s"
