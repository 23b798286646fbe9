"""`dlm shard`: splits a model into a shard set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import WRITE_FOLDER, check_reads
from dlm.cli.options import (
    EngineName,
    HalfMemory,
    Json,
    Silent,
    Threads,
    Tmp,
    option,
)
from dlm.cli.output import compile_kernels, print_answer, stage_printer
from dlm.index.settings import LOSSLESS_BITS, ShardSettings

if TYPE_CHECKING:
    from dlm.index.layout import Manifest


def shard(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="ARPA file (plain, .gz, .zst or .xz), or KenLM binary file. With Spark, an ARPA "
            "file (plain, .gz or .bz2) or a folder of parts, at any address that Spark reads.",
        ),
    ],
    shards: Annotated[int, option(ShardSettings, "shards")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to create, or a store URL."),
        WRITE_FOLDER,
    ] = None,
    encoding: Annotated[str, option(ShardSettings, "encoding")] = "exact",
    bits: Annotated[int | None, option(ShardSettings, "bits")] = None,
    slots_of: Annotated[
        Path | None,
        typer.Option(
            "--slots-of",
            metavar="DIR",
            help="Split the model like this shard set: the same number of shards, each with the "
            "same slots.",
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Add missing prefixes of n-grams; scores may change in the last bit.",
        ),
    ] = False,
    memory: HalfMemory = None,
    tmp: Tmp = None,
    threads: Threads = 2,
    engine: Annotated[
        EngineName,
        typer.Option(help="Run in this process, or as Spark jobs (extra `spark`)."),
    ] = EngineName.LOCAL,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Print the expected sizes, and build nothing."),
    ] = False,
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Split a model into shards that servers map into memory.

    A model larger than the memory limit is sorted on disk. If the command is interrupted, run it
    again: it resumes.

    Examples:
        dlm shard model.arpa.zst --shards 4 --estimate
        dlm shard model.arpa.zst --shards 2 --output shards/model
        dlm shard model.arpa.zst -B 1 --encoding compact -o shards/small
    """
    if engine is EngineName.LOCAL:  # otherwise MODEL may be on Spark's own file system
        check_reads("MODEL", model, folders=True)
    if estimate:
        _estimate(Path(model), shards, bits, as_json)
        return
    from dlm.cli.push import local_output
    from dlm.errors import ConfigError
    from dlm.index.making.shard_set import KERNELS, build_shard_set

    if output is None:
        raise ConfigError("--output is missing; name the folder to create, or pass --estimate")
    tell = stage_printer(quiet=quiet)
    slots = None
    if slots_of is not None:
        from dlm.index.layout import read_manifest

        like = read_manifest(slots_of)
        if shards not in (1, like.shards):
            raise ConfigError(
                f"--shards is {shards}, but --slots-of {slots_of} has {like.shards} shards; leave "
                "out one of the two options"
            )
        shards, slots = like.shards, like.slots

    if engine is EngineName.SPARK:
        asked = (encoding != "exact", bits is not None, repair, memory is not None, tmp is not None)
        if any(asked):
            raise ConfigError(
                "--encoding compact, --bits, --repair, --memory and --tmp apply to --engine local "
                "only; leave them out, or shard the model on one machine"
            )
        from dlm.spark.session import session
        from dlm.spark.shards import build_shard_set as build_by_spark

        tell("starting Spark")
        with session() as spark:
            manifest = build_by_spark(spark, model, output, shards, slots=slots, progress=tell)
        _report(manifest, output, tell, as_json, quiet)
        return
    compile_kernels(KERNELS)
    with local_output(output, tmp, tell) as folder:
        manifest = build_shard_set(
            model,
            folder,
            shards,
            encoding=encoding,
            bits=bits,
            slots=slots,
            repair=repair,
            memory_bytes=memory,
            spill=tmp,
            threads=threads,
            progress=tell,
        )
    _report(manifest, output, tell, as_json, quiet)


def _report(
    manifest: Manifest, output: Path, tell: Callable[[str], None], as_json: bool, quiet: bool
) -> None:
    from dlm.cli.inspect import facts_of, summary

    tell(f"done: {output}")
    if as_json or not quiet:
        facts = facts_of(manifest, output)
        print_answer(facts, summary(facts), as_json=as_json)


def _estimate(model: Path, shards: int, bits: int | None, as_json: bool) -> None:
    """Prints one row per encoding: bytes on disk per set and shard, and in memory per client."""
    from dlm.index.coding import DEFAULT_BITS
    from dlm.index.describe import PROCESS_MIB
    from dlm.index.sizes import estimate_sizes, measure
    from dlm.units import counted, size_text

    found = measure(model, progress=stage_printer(quiet=as_json))
    ngrams = max(sum(found.counts), 1)
    asked = DEFAULT_BITS if bits is None else bits
    encodings: list[tuple[str, str, int | None]] = [("exact", "exact", None)]
    encodings += [(f"compact --bits {b}", "compact", b) for b in sorted({asked, LOSSLESS_BITS})]
    estimated = [
        (name, estimate_sizes(found, shards, encoding, width))
        for name, encoding, width in encodings
    ]
    rows = [
        {
            "encoding": name,
            "disk_bytes": sizes.disk,
            "shard_bytes": sizes.shard,
            "client_bytes": sizes.client,
        }
        for name, sizes in estimated
    ]
    pieces = counted(shards, "shard")
    columns = ("file per shard", "memory per client")
    lines = [
        f"{ngrams:,} n-grams up to order {len(found.counts)} in {pieces}; sizes to within 10 %:",
        f"  {'':18} {'on disk':>21} {'':18}" + "".join(f"{name:>20}" for name in columns),
    ]
    for name, sizes in estimated:
        total = sizes.disk
        lines.append(
            f"  {name:18} {total:>15,} bytes  {total / ngrams:5.2f} per n-gram"
            + "".join(f"{size_text(n):>20}" for n in (sizes.shard, sizes.client))
        )
    lines.append(
        "A server maps the file of its shard, once per host. In addition, each process takes up to "
        f"{PROCESS_MIB} MiB.\n"
        "Clients on one host share the low orders; each process has its own words."
    )
    facts = {"counts": list(found.counts), "shards": shards, "sizes": rows}
    print_answer(facts, lines, as_json=as_json)
