"""`dlm serve`: one shard of one or more models, answering."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

_RFC_3339 = "%Y-%m-%dT%H:%M:%S.%fZ"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """One JSON object a line: the event's name and its fields; never query text.

    Times are UTC as RFC 3339 has them.

    Args
        context  fields of every line whose event has none of that name
    """

    def __init__(self, context: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._context = dict(context or {})

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
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
    """Sends the library's events to standard error; see `JsonLines`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(context))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def serve(
    directories: Annotated[
        list[Path], typer.Argument(help="Folder of a shard set; more folders, more models.")
    ],
    shard: Annotated[int, typer.Option(help="Which shard of each to serve, from 0.")],
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; loopback by default.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that share the port; 1 by default.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file: the server's chain.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file: its key, mode 600.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="PEM file: who signs certificates that clients must show.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="File of the tokens that let clients in; see dlm token.")
    ] = None,
    open_health: Annotated[
        bool | None, typer.Option("--open-health", help="Health checks need no token.")
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Let other machines ask without TLS or saying who asks."),
    ] = None,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", hidden=True)] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics, /healthz and /readyz; 0 is none.")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of that port; loopback by default.")
    ] = None,
    preload: Annotated[
        bool | None, typer.Option("--preload", help="Map every page before reporting ready.")
    ] = None,
    mlock: Annotated[
        bool | None, typer.Option("--mlock", help="Keep the pages in memory; implies --preload.")
    ] = None,
    huge_pages: Annotated[
        bool | None, typer.Option("--huge-pages", help="Copy the files to huge pages first.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [server].")] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Written once ready: JSON with port, shard, shard_sets, pid."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve one shard until SIGTERM; then finish what is in flight.

    Several folders are several models behind one port: a call names the one it means, or gets the
    first.

    Example: dlm serve shards/model --shard 0 --port 50060 --workers 4
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.config import resolve
    from dlm.errors import ConfigError
    from dlm.server.app import serve as run
    from dlm.server.config import ServerConfig

    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level {log_level}: debug, info, warning or error is expected")
    if allow_remote:
        raise ConfigError(
            "--allow-remote is gone: give --tls-cert and --tls-key with --tls-client-ca or "
            "--tokens, or --insecure on a network where every machine may read the model"
        )
    check_reads("DIR", *directories, folders=True, what="folder")
    check_writes("--ready-file", ready_file)
    flags = {
        "port": port,
        "host": host,
        "workers": workers,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "tokens": tokens,
        "open_health": open_health,
        "insecure": insecure,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
        "preload": preload,
        "mlock": mlock,
        "huge_pages": huge_pages,
    }
    settings = resolve(ServerConfig, "server", flags=flags, file=config)
    # A free port is known later, and told by server.ready.
    log_to_stderr(
        log_level, {"shard": shard} | ({"address": settings.address} if settings.port else {})
    )
    raise typer.Exit(run(settings, directories, shard, ready_file=ready_file))
