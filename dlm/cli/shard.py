"""`dlm shard`: an ARPA file becomes a shard set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.progress import stage_printer


def shard(
    model: Annotated[Path, typer.Argument(help="ARPA file: plain, .gz, .zst or .xz.")],
    shards: Annotated[int, typer.Option("--shards", "-B", help="How many shards, 1 to 4,096.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to make.")] = None,
    encoding: Annotated[
        str, typer.Option(help="exact, or compact: smaller, with quantised values.")
    ] = "exact",
    bits: Annotated[
        int | None,
        typer.Option(help="Of a value, with compact: 3 to 16, 6 if not given; 32 keeps values."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(help="Add prefixes that the model lacks; scores keep all but the last bit."),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Limit, as 800M or 2G; half of what is free if not given."),
    ] = None,
    tmp: Annotated[
        Path | None, typer.Option(help="Folder for what does not fit in it; beside the output.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that parse and sort.")] = 2,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Tell how many bytes it would take; build nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Shard an ARPA model.

    A model larger than the memory is sorted on disk. If that is interrupted, the same command goes
    on where it was.

    Example: dlm shard model.arpa.zst --shards 4 --output shards/model
    """
    if estimate:
        _estimate(model, shards, bits)
        return
    from dlm.cli.compiling import compile_kernels
    from dlm.cli.inspect import summary
    from dlm.cli.paths import check_folder, check_reads, check_writes
    from dlm.errors import ConfigError
    from dlm.index.build.shard_set import KERNELS, build_shard_set
    from dlm.resources import parse_size

    if output is None:
        raise ConfigError("give --output DIR, the folder to make (or --estimate to build nothing)")
    check_reads("MODEL", model, folders=True)
    check_writes("--output", output, folder=True)
    check_folder("--tmp", None if tmp is None else tmp.absolute(), made=True)
    tell = stage_printer(quiet=quiet)

    compile_kernels(KERNELS)
    manifest = build_shard_set(
        model,
        output,
        shards,
        encoding=encoding,
        bits=bits,
        repair=repair,
        memory_bytes=None if memory is None else parse_size(memory),
        spill=tmp,
        threads=threads,
        progress=tell,
    )
    tell(f"done: {output}")
    if not quiet:
        summary(manifest, output)


def _estimate(model: Path, shards: int, bits: int | None) -> None:
    """Prints a line for each encoding: on disk, and in memory by shard, server and client."""
    from dlm.cli.status import size
    from dlm.index.coding import DEFAULT_BITS, LOSSLESS_BITS
    from dlm.index.describe import PROCESS_MIB
    from dlm.index.sizes import estimate_sizes, measure

    found = measure(model)
    ngrams = max(sum(found.counts), 1)
    asked = DEFAULT_BITS if bits is None else bits
    print(f"{ngrams:,} n-grams of order {len(found.counts)} in {shards} shards, within 10 %:")
    columns = ("a shard's file", "memory of a server", "memory of a client")
    print(f"  {'':18} {'on disk':>21} {'':17}" + "".join(f"{name:>20}" for name in columns))
    for name, encoding, width in (
        ("exact", "exact", None),
        *((f"compact --bits {b}", "compact", b) for b in sorted({asked, LOSSLESS_BITS})),
    ):
        sizes = estimate_sizes(found, shards, encoding, width)
        total = sizes.disk
        print(
            f"  {name:18} {total:>15,} bytes  {total / ngrams:5.2f} an n-gram"
            + "".join(f"{size(n):>20}" for n in (sizes.shard, sizes.server, sizes.client))
        )
    print(
        f"A server maps that once, whatever its workers; beside it each process takes up to "
        f"{PROCESS_MIB} MiB: the workers,\nand one above them where there are several. "
        "A client's low orders are mapped and shared on its host; its words are in each process."
    )
