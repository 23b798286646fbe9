"""`dlm serve`: serves one shard of one or more models."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.cli.checks import READ_PLACE, WRITE, check_reads
from dlm.cli.options import ACCESS, LogLevel, Options
from dlm.config import resolve
from dlm.errors import ConfigError
from dlm.server.config import ServerConfig
from dlm.stores.remote import located

_RFC_3339 = "%Y-%m-%dT%H:%M:%S.%fZ"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """One JSON object per line: the event's name and its fields, but never query text; `context`
    gives fields that the event does not set. Times are UTC in the form of RFC 3339."""

    def __init__(self, context: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._context = dict(context or {})

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).strftime(_RFC_3339),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", None) or record.getMessage(),
        }
        fields |= self._context
        fields |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def log_to_stderr(level: str, context: Mapping[str, Any]) -> None:
    """Logs the library's events to standard error; see `JsonLines`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(context))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def serve(
    shard: Annotated[int, typer.Option(help="Which shard of each set to serve, from 0.")],
    flags: Annotated[
        dict[str, Any],
        Options(
            f"sets port host share_port {ACCESS} open_health insecure metrics_port metrics_host "
            "preload mlock huge_pages public_key",
            of=ServerConfig,
        ),
    ],
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR...]",
            help="Folders of shard sets, or their URLs in stores, one per model.",
        ),
        READ_PLACE,
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with a table [server]."),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to write once ready: JSON with port, shard, shard_sets and pid.",
        ),
        WRITE,
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Serve one shard until SIGTERM, then finish requests in flight.

    With several folders, the server serves several models on one port; a request names its model,
    or gets the first. With --sets, a file lists the folders, and the server follows its changes.
    Logs are JSON, one object per line, on standard error.

    Examples:
        dlm serve shards/model --shard 0 --port 50060 --metrics-port 9464
        dlm serve --sets sets --shard 0 --port 50060
        dlm serve s3://models/en-2026-11 --shard 0 --port 50060
        dlm serve shards/model --shard 0 --port 50060 --host 0.0.0.0 \\
            --tls-cert server.pem --tls-key server.key --tokens tokens
    """
    from dlm.server.app import serve as run

    folders = [located(one) for one in directories or []]
    check_reads("--sets", flags["sets"], stores=True)
    settings = resolve(ServerConfig, "server", flags=flags, file=config)
    if bool(settings.sets) == bool(folders):
        found = f"found DIR and --sets {settings.sets}" if folders else "found no DIR and no --sets"
        raise ConfigError(
            f"{found}; give either the folders of shard sets (DIR), or a file that lists them "
            "(--sets)"
        )
    # With port 0, the port is not known yet; the event server.ready reports it.
    log_to_stderr(
        log_level, {"shard": shard} | ({"address": settings.address} if settings.port else {})
    )
    raise typer.Exit(run(settings, folders, shard, ready_file=ready_file))
