"""`dlm shard`: an ARPA file becomes a shard set."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def shard(
    model: Annotated[Path, typer.Argument(help="ARPA file: plain, .gz, .zst or .xz.")],
    shards: Annotated[int, typer.Option("--shards", "-B", help="How many shards, 1 to 4,096.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")],
    encoding: Annotated[
        str, typer.Option(help="exact, or compact: smaller, with quantised values.")
    ] = "exact",
    bits: Annotated[
        int | None,
        typer.Option(help="Of a value, with compact: 2 to 16; 32 keeps values as they are."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(help="Add prefixes that the model lacks; scores keep all but the last bit."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Shard an ARPA model.

    Example: dlm shard model.arpa.zst --shards 4 --output shards/model
    """
    from dlm.cli.inspect import summary
    from dlm.index.build import build_shard_set

    began = time.monotonic()

    def tell(line: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr)

    manifest = build_shard_set(
        model, output, shards, encoding=encoding, bits=bits, repair=repair, progress=tell
    )
    tell(f"done: {output}")
    if not quiet:
        summary(manifest)
