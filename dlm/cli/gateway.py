"""`dlm gateway`: scores by gRPC and HTTP for programs in any language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.options import (
    Ca,
    Cert,
    ClusterFile,
    Key,
    LogLevel,
    ServedModel,
    ServerName,
    TokenFile,
    option,
)
from dlm.gateway.config import GatewayConfig

TlsCert = Annotated[str | None, option(GatewayConfig, "tls_cert", metavar="FILE")]
TlsKey = Annotated[str | None, option(GatewayConfig, "tls_key", metavar="FILE")]
TlsClientCa = Annotated[str | None, option(GatewayConfig, "tls_client_ca", metavar="FILE")]
Tokens = Annotated[str | None, option(GatewayConfig, "tokens", metavar="FILE")]


def gateway(
    cluster: ClusterFile = Path("cluster.toml"),
    local: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Shard set or KenLM binary file to answer from, without any servers.",
        ),
    ] = None,
    vocab: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Words of a KenLM file of --local that stores none."),
    ] = None,
    model: ServedModel = None,
    port: Annotated[int | None, option(GatewayConfig, "port")] = None,
    http_port: Annotated[int | None, option(GatewayConfig, "http_port")] = None,
    host: Annotated[str | None, option(GatewayConfig, "host")] = None,
    workers: Annotated[int | None, option(GatewayConfig, "workers")] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    tokens: Tokens = None,
    insecure: Annotated[bool | None, option(GatewayConfig, "insecure")] = None,
    bigram_fallback: Annotated[
        bool,
        typer.Option(
            "--bigram-fallback",
            help="If no server answers in time, answer from 2-grams alone, and mark it.",
        ),
    ] = False,
    ca: Ca = "",
    cert: Cert = "",
    key: Key = "",
    server_name: ServerName = "",
    token_file: TokenFile = "",
    metrics_port: Annotated[int | None, option(GatewayConfig, "metrics_port")] = None,
    metrics_host: Annotated[str | None, option(GatewayConfig, "metrics_host")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with a table [gateway]."),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write once ready: JSON with port, http_port and pid."
        ),
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Answer programs in any language, by gRPC and HTTP with JSON.

    It asks a cluster, or a shard set in its own process. Several gateways may stand behind a
    balancer: a state that one of them returned is good on each. Logs are JSON, one object per line,
    on standard error, and have no text that was asked.

    Examples:
        dlm gateway --cluster cluster.toml
        dlm gateway --local shards/model --http-port 8080
        dlm gateway --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --tokens t
    """
    import dlm.server.poller  # noqa: F401 - before anything else imports gRPC
    from dlm.cli.paths import check_reads, check_writes
    from dlm.cli.serve import check_log_level, log_to_stderr
    from dlm.client import AsyncClient, ClientConfig
    from dlm.config import resolve
    from dlm.errors import ConfigError
    from dlm.gateway.app import Opening, serve

    check_log_level(log_level)
    if local is not None:
        check_reads("--local", local, folders=True)
    if vocab is not None:
        if local is None:
            raise ConfigError("--vocab has the words of the model of --local; give that too")
        check_reads("--vocab", vocab)
    check_writes("--ready-file", ready_file)
    flags = {
        "port": port,
        "http_port": http_port,
        "host": host,
        "workers": workers,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "tokens": tokens,
        "insecure": insecure,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
    }
    settings = resolve(GatewayConfig, "gateway", flags=flags, file=config)
    log_to_stderr(log_level, {})

    def connect() -> Opening:
        if local is not None:
            return lambda: AsyncClient.local(local, vocab=vocab)
        given = ClientConfig(
            ca=ca,
            cert=cert,
            key=key,
            server_name=server_name,
            token_file=token_file,
            bigram_fallback=bigram_fallback,
            heartbeats=True,
            trace=settings.trace,
        )
        return lambda: AsyncClient.connect(cluster, given, model=model)

    raise typer.Exit(serve(settings, connect(), ready_file=ready_file))
