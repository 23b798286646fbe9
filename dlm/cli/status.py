"""`dlm status`: the state of every server of a cluster, once or until Ctrl-C."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.checks import within
from dlm.cli.options import SECURITY, ClusterFile, Json, Options
from dlm.cli.output import print_json
from dlm.client.config import ClientSecurity
from dlm.errors import ConfigError
from dlm.units import size_text

if TYPE_CHECKING:
    from rich.console import Group

    from dlm.client.cluster_file import Rollout
    from dlm.cluster.status import ClusterSnapshot, ClusterStatus, Row

SHARD_SET = "shard set"
COLUMNS = (
    "address",
    "shard",
    "state",
    "processes",
    SHARD_SET,
    "queries/s",
    "messages/s",
    "refused",
    "failing",
    "in flight",
    "CPU %",
    "memory",
    "uptime",
    "delay",
)
# Columns that a narrow terminal drops, in order; SHARD_SET last if servers hold several sets.
DROPPED = (
    *(SHARD_SET, "uptime", "memory", "messages/s", "processes", "refused", "delay", "failing"),
    "in flight",
)
WAIT_LOOK_S = 0.5
SOME_SECONDS = within(above=0, high=3600, unit="seconds")
SHARDS_SHOWN = 4  # maximum number of shards that the summary line names
_COLOURS = {"ready": "green", "warming": "yellow", "draining": "yellow"}


def status(
    *,
    cluster: ClusterFile = Path("cluster.toml"),
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every --interval until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(help="Seconds between the two heartbeats that rates are computed from."),
        SOME_SECONDS,
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a server's answer."), SOME_SECONDS
    ] = 2.0,
    wait: Annotated[
        float,
        typer.Option(
            help="Seconds to wait for cluster.toml to exist and for every listed server to be "
            "ready; 0 does not wait."
        ),
        within(low=0, high=86_400, unit="seconds"),
    ] = 0.0,
    given: Annotated[ClientSecurity, Options(SECURITY)],
) -> None:
    """Show the state of every server of a cluster.

    Exits with 1 if a shard has no ready server, if a server rejects the client's credentials, or if
    no server holds the model that cluster.toml names; with --wait, also if a listed server is not
    ready in time. The options for TLS and tokens override cluster.toml.

    Examples:
        dlm status
        dlm status --cluster cluster.toml --watch
        dlm status --wait 60 --json
    """
    from contextlib import suppress
    from functools import partial

    from dlm.client.cluster_file import ClusterToml, check_files
    from dlm.client.server import Connection
    from dlm.cluster.status import ClusterStatus
    from dlm.server.sets import signature_of
    from dlm.stores.remote import located

    if as_json and watch:
        raise ConfigError("--json and --watch were both given; give one of them")
    if wait and watch:
        raise ConfigError("--wait and --watch were both given; give one of them")

    place = located(cluster)

    def listed() -> ClusterStatus:
        toml = ClusterToml(place)
        endpoints, security = toml.servers(), given.over(toml.security())
        check_files(security)  # a fault in these files is not a server's
        connect = partial(Connection, security=security)

        def rollout() -> Rollout | None:
            with suppress(ConfigError):  # like clients, ignores a file that has faults
                return toml.again().rollout()
            return None

        return ClusterStatus(endpoints, connect, timeout, model=toml.model(), rollout=rollout)

    pause = threading.Event()  # never set; a signal ends the wait at once
    end = time.monotonic() + wait
    while not place.exists() and time.monotonic() < end:
        pause.wait(min(interval, WAIT_LOOK_S))
    stamp = signature_of(place)
    servers = listed()
    try:
        snapshot = servers.poll()
        while wait and not snapshot.whole and time.monotonic() < end:
            pause.wait(min(interval, WAIT_LOOK_S))
            if signature_of(place) != stamp and place.exists():  # the file was an earlier cluster's
                stamp = signature_of(place)
                servers.close()
                servers = listed()
            snapshot = servers.poll()
        if watch:
            _watch(servers, pause, interval)
            return
        pause.wait(interval)
        snapshot = servers.poll()
    finally:
        servers.close()
    if as_json:
        print_json({**snapshot.facts(), "interval_s": interval})
    else:
        _print(snapshot)
    wrong = snapshot.missing or snapshot.refused or snapshot.down or snapshot.unserved
    if wrong or (wait and not snapshot.whole):
        raise typer.Exit(1)


def _watch(servers: ClusterStatus, pause: threading.Event, interval: float) -> None:
    from contextlib import suppress
    from datetime import datetime

    from rich.console import Console
    from rich.live import Live

    console = Console()
    with suppress(KeyboardInterrupt):
        if not console.is_terminal:
            while True:
                print(datetime.now().astimezone().isoformat(timespec="seconds"))
                _print(servers.poll())
                sys.stdout.flush()
                pause.wait(interval)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                snapshot = servers.poll()
                live.update(render(snapshot, console.width, console.height), refresh=True)
                pause.wait(interval)


def _print(snapshot: ClusterSnapshot) -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        console = Console()
        console.print(render(snapshot, console.width))
        return
    # In a pipe, rows are not cut to a terminal's width.
    Console(width=10_000).print(render(snapshot))


def render(snapshot: ClusterSnapshot, width: int | None = None, height: int | None = None) -> Group:
    """Draws problems, the number of ready servers, the mode of the cascade, and a table. If that
    does not fit, columns of `DROPPED` are left out in order; then rows are merged per server, and
    then per shard."""
    from rich.console import Console

    lines = [(line, "red") for line in problems(snapshot)]
    summary = [ready(snapshot), cascade(snapshot)]
    if snapshot.rollout is not None:
        summary.append((snapshot.rollout.text, "yellow"))
    lines += summary
    if height is None:
        return _drawn(lines, snapshot.rows, width)
    console = Console(width=width, height=height)

    def fits(rows: Sequence[Row]) -> bool:
        group = _drawn(lines, rows, width)
        return len(console.render_lines(group)) < height  # the last line is for the cursor

    rows: Sequence[Row] = snapshot.rows
    for name in ("address", "shard"):
        if not fits(rows):
            rows = merge_rows(snapshot.rows, name)
    if not fits(rows):
        lines.append((f"showing the first of {len(rows)} rows", "red"))
        while len(rows) > 1 and not fits(rows):
            rows = rows[:-1]
        while summary and not fits(rows):
            lines.remove(summary.pop())
    return _drawn(lines, rows, width)


def _drawn(lines: Sequence[tuple[str, str]], rows: Sequence[Row], width: int | None) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    cells = [cells_of(row) for row in rows]
    widths = {
        name: max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(COLUMNS)
    }
    several = len({row.shard_set for row in rows if row.shard_set}) > 1
    names = fitting_columns(
        widths, width, sorted(DROPPED, key=SHARD_SET.__eq__) if several else DROPPED
    )
    table = Table()
    for name in names:
        table.add_column(
            name,
            justify="left" if name in ("address", "state", SHARD_SET) else "right",
            # A long address continues on the next line, since its end is the port.
            min_width=len(name) if name == "address" else widths[name],
            overflow="fold",
        )
    for row, texts in zip(rows, cells, strict=True):
        colour = _COLOURS.get(row.state, "red")
        chosen = [(name, texts[COLUMNS.index(name)]) for name in names]
        table.add_row(*(Text(text, colour if name == "state" else "") for name, text in chosen))
    return Group(*(Text(line, colour) for line, colour in lines), table)


def problems(snapshot: ClusterSnapshot) -> list[str]:
    """One line per problem; servers with the same problem share a line."""
    from dlm.client.census import dedupe_faults

    out = dedupe_faults((row.address, row.error) for row in snapshot.rows if row.error)
    out += [f"shard {shard}: no server is ready" for shard in snapshot.missing]
    unlike = {row.address: row for row in snapshot.rows if row.alike != row.processes}
    out += [
        f"{address}: only {row.alike} of its {row.processes} processes hold the same models"
        for address, row in unlike.items()
    ]
    if snapshot.down and not snapshot.missing:
        out.append("no server is ready")
    if snapshot.unserved:
        held = sorted({row.model for row in snapshot.rows if row.model})
        out.append(
            f"cluster.toml names model {snapshot.unserved}, but no server that answers holds it; "
            f"they hold {', '.join(held)}. Name one of these in cluster.toml, or serve that model"
        )
    out += [
        f"{row.address}: slow, {row.delay_ms:.3g} ms; clients ask the other servers of shard "
        f"{row.shard} first"
        for row in snapshot.rows
        if row.slow and row.delay_ms is not None and row.shard not in snapshot.slow
    ]
    return out + [f"shard {shard}: all servers are slow" for shard in snapshot.slow]


def ready(snapshot: ClusterSnapshot) -> tuple[str, str]:
    """A line and its colour: how many servers are ready, in all and for each shard that has unready
    servers. A server is ready if it is ready for each of its models."""
    is_ready: dict[str, bool] = {}
    shard_of: dict[str, int | None] = {}
    for row in snapshot.rows:
        is_ready[row.address] = is_ready.get(row.address, True) and row.state == "ready"
        shard_of[row.address] = row.shard
    line = f"{sum(is_ready.values())} of {len(is_ready)} servers ready"
    lacking = {shard_of[address] for address, ready in is_ready.items() if not ready}
    shards = sorted(shard for shard in lacking if shard is not None)
    for shard in shards[:SHARDS_SHOWN]:
        states = [is_ready[address] for address, found in shard_of.items() if found == shard]
        line += f"{', ' if ';' in line else '; '}shard {shard} has {sum(states)} of {len(states)}"
    if len(shards) > SHARDS_SHOWN:
        line += f", and {len(shards) - SHARDS_SHOWN} more shards lack servers"
    return line, "green" if not lacking else "red" if snapshot.missing else "yellow"


def cascade(snapshot: ClusterSnapshot) -> tuple[str, str]:
    """A line and its colour: the mode that clients are in, judging by heartbeats."""
    from dlm.client.health import Mode

    if snapshot.mode is Mode.FULL:
        return "mode: full", "green"
    if snapshot.mode is None:
        return "mode: unknown", "yellow"
    return "mode: local_fallback where configured, otherwise bigram_fallback or errors", "red"


def fitting_columns(
    widths: dict[str, int], width: int | None, droppable: Sequence[str] = DROPPED
) -> list[str]:
    """The names of `COLUMNS` that fit side by side; those not `droppable` always stay."""
    dropped: set[str] = set()
    for name in ("", *droppable):
        dropped.add(name)
        names = [name for name in COLUMNS if name not in dropped]
        # Each column needs a border and two spaces; one more border is at the end.
        if width is None or sum(widths[name] + 3 for name in names) + 1 <= width:
            break
    return names


def merge_rows(rows: Iterable[Row], name: str) -> list[Row]:
    """Merges rows with an equal field `name`, with sums, the shortest uptime, the longest delay."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(getattr(row, name), []).append(row)
    return [group[0] if len(group) == 1 else _sum(group) for group in groups.values()]


def _sum(rows: Sequence[Row]) -> Row:
    from dataclasses import replace

    def total(name: str) -> Any:
        found = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        return sum(found) if found else None

    def most(name: str) -> Any:
        return max((getattr(r, name) for r in rows if getattr(r, name) is not None), default=None)

    def one(name: str, many: str) -> Any:
        found = list(dict.fromkeys(getattr(row, name) for row in rows))
        return found[0] if len(found) == 1 else f"{len(found)} {many}"

    sums = ("queries_per_s", "messages_per_s", "refused", "in_flight", "cpu_percent")
    states = dict.fromkeys(row.state for row in rows)
    told = [f"{sum(row.state == state for row in rows)} {state}" for state in states]
    return replace(
        rows[0],
        address=one("address", "servers"),
        state=rows[0].state if len(states) == 1 else ", ".join(told),
        processes=sum({row.address: row.processes or 0 for row in rows}.values()) or None,
        model=one("model", "models"),
        memory_bytes=total("memory_bytes"),
        uptime_s=min((r.uptime_s for r in rows if r.uptime_s is not None), default=None),
        round_trip_ms=most("round_trip_ms"),
        delay_ms=most("delay_ms"),
        delay_ratio=most("delay_ratio"),
        failing_percent=most("failing_percent"),
        error=None,
        **{name: total(name) for name in sums},
    )


def cells_of(row: Row) -> list[str]:
    """The text of each column; unknown values are empty."""

    def number(value: float | None, form: str = ",.0f") -> str:
        return "" if value is None else format(value, form)

    delay = "" if row.delay_ms is None else f"{row.delay_ms:.1f} ms"
    if row.delay_ratio is not None:
        delay += f" {row.delay_ratio:.1f}x"
    return [
        row.address,
        number(row.shard, "d") or "?",
        row.state,
        number(row.processes, "d"),
        row.shard_set or "",
        number(row.queries_per_s),
        number(row.messages_per_s),
        number(row.refused),
        "" if row.failing_percent is None else f"{row.failing_percent:.1f} %",
        number(row.in_flight),
        number(row.cpu_percent),
        "" if row.memory_bytes is None else size_text(row.memory_bytes),
        "" if row.uptime_s is None else duration(row.uptime_s),
        delay,
    ]


def duration(seconds: float) -> str:
    """A duration as 42 s, 3 m 20 s, 5 h 10 m or 12 d 3 h."""
    whole = int(seconds)
    for unit, size, smaller, small in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {smaller}"
    return f"{whole} s"
