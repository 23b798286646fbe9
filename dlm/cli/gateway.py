"""`dlm gateway`: serves scores over gRPC and HTTP to programs in any language."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm.cli.checks import READ, READ_PLACE, WRITE
from dlm.cli.options import ACCESS, CREDENTIALS, ClusterFile, LogLevel, Options, ServedModel
from dlm.client.config import ClientSecurity
from dlm.config import resolve
from dlm.errors import ConfigError
from dlm.gateway.config import GatewayConfig


def gateway(
    *,
    cluster: ClusterFile = Path("cluster.toml"),
    local: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Shard set or KenLM binary file to answer from, without any servers.",
        ),
        READ_PLACE,
    ] = None,
    vocab: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Words, if --local is a KenLM file that stores none."),
        READ,
    ] = None,
    model: ServedModel = None,
    flags: Annotated[
        dict[str, Any],
        Options(
            f"port http_port host share_port {ACCESS} insecure metrics_port metrics_host",
            of=GatewayConfig,
        ),
    ],
    bigram_fallback: Annotated[
        bool,
        typer.Option(
            "--bigram-fallback",
            help="If no server answers in time, answer from 2-grams alone, and mark the answer.",
        ),
    ] = False,
    credentials: Annotated[ClientSecurity, Options(CREDENTIALS)],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with a table [gateway]."),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write once ready: JSON with port, http_port and pid."
        ),
        WRITE,
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Answer programs in any language, over gRPC or HTTP with JSON.

    The gateway queries a cluster, or a shard set in its own process. Several can run behind a load
    balancer: all of them accept a state that one of them returned. Logs are JSON, one object
    per line, on standard error, and contain no text of queries.

    Examples:
        dlm gateway --cluster cluster.toml
        dlm gateway --local shards/model --http-port 8080
        dlm gateway --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --tokens t
    """
    import dlm.server.poller  # noqa: F401 - before anything else imports gRPC
    from dlm.cli.serve import log_to_stderr
    from dlm.client import AsyncClient, ClientConfig
    from dlm.gateway.app import Opening, serve

    if vocab is not None and local is None:
        raise ConfigError(
            "--vocab gives the words of the model of --local, but --local is missing; give both"
        )
    settings = resolve(GatewayConfig, "gateway", flags=flags, file=config)
    log_to_stderr(log_level, {})

    def connect() -> Opening:
        if local is not None:
            return lambda: AsyncClient.local(local, vocab=vocab)
        given = ClientConfig(
            **asdict(credentials),
            bigram_fallback=bigram_fallback,
            heartbeats=True,
            trace=settings.trace,
        )
        return lambda: AsyncClient.connect(cluster, given, model=model)

    raise typer.Exit(serve(settings, connect(), ready_file=ready_file))
