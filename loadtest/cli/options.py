"""Options that commands share, each with one name and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DefaultTrace = Annotated[
    Path | None, typer.Argument(help="Trace to replay; default: the packaged one.")
]
TraceOutput = Annotated[Path, typer.Option(help="Trace to write.")]
Cluster = Annotated[
    Path | None,
    typer.Option(help="cluster.toml of the servers; without it, a cluster is started here."),
]
ShardSet = Annotated[
    Path | None, typer.Option(help="Shard set to serve here instead of the packaged model.")
]
Shards = Annotated[
    int, typer.Option(min=1, max=64, help="Servers to start here for the packaged model.")
]
