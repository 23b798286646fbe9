"""`dlm reshard`: makes a shard set for more, fewer or other servers from the set itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.checks import READ_PLACE, WRITE_FOLDER
from dlm.cli.options import HalfMemory, Json, Options, Silent, Threads, Tmp
from dlm.cli.output import compile_kernels, print_answer, stage_printer
from dlm.index.settings import ReshardSettings
from dlm.units import counted, size_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlm.index.layout import Manifest
    from dlm.index.moving.plan import SlotPlan

ROWS = 20  # maximum number of moves that are printed


def reshard(
    directory: Annotated[
        Path, typer.Argument(metavar="SET", help="Folder of a shard set."), READ_PLACE
    ],
    settings: Annotated[ReshardSettings, Options()],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to create."),
        WRITE_FOLDER,
    ] = None,
    remove: Annotated[
        list[int] | None,
        typer.Option(
            "--remove",
            metavar="SHARD",
            help="Shard whose server to remove; repeat the option for each.  [default: the last "
            "ones]",
        ),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            metavar="PAGE",
            help="Balance queries, not bytes: a server's load page, as a file or "
            "http://HOST:METRICS_PORT/load; repeat the option for each server.",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would change, and make nothing.")
    ] = False,
    memory: HalfMemory = None,
    tmp: Tmp = None,
    threads: Threads = 2,
    as_json: Json = False,
    quiet: Silent = False,
) -> None:
    """Make a shard set for more, fewer or other servers.

    Moves the fewest slots that bring every shard within the bound, by bytes or by load. Only
    shards that change are made, from the set's own files; the others are hard links. If the command
    is interrupted, run it again: it resumes.

    Examples:
        dlm reshard shards/model --shards 3 --plan
        dlm reshard shards/model --shards 3 --output shards/model-3
        dlm reshard shards/model-3 -B 2 --remove 0 -o shards/model-2
    """
    from dlm.resources import give_way

    give_way()  # servers may share this machine
    from dlm.cli.push import local_output
    from dlm.cluster.load import slot_load
    from dlm.errors import ConfigError
    from dlm.index.layout import MANIFEST
    from dlm.index.making.shard_set import check_destination
    from dlm.index.moving import reshard as moving
    from dlm.index.moving.plan import plan_slots
    from dlm.index.moving.subtrees import SourceSet
    from dlm.index.placed import local_set
    from dlm.ngram.partition import check_shards
    from dlm.record.signature import signature_of
    from dlm.stores.remote import RemotePath, located

    if output is None and not plan:
        raise ConfigError("--output is missing; name the folder to create, or pass --plan")
    if output is not None and not isinstance(located(output), RemotePath):
        check_destination(output)
    tell = stage_printer(quiet=quiet)
    compile_kernels(moving.KERNELS)
    source = SourceSet.open(local_set(located(directory), tell), tell)
    manifest = source.manifest
    shards = manifest.shards if settings.shards is None else settings.shards
    check_shards(shards)
    queries = slot_load(load, manifest) if load else None
    size = source.slot_bytes(tell)
    found = plan_slots(
        manifest.slots,
        size if queries is None else queries,
        shards,
        removed=remove,
        bound=settings.bound,
    )
    facts = _facts(manifest, found, shards, size, queries)
    if plan or output is None:
        print_answer(facts, _lines(directory, facts), as_json=as_json)
        return
    with local_output(output, tmp, tell) as folder:
        made = moving.reshard(
            source,
            found.after,
            shards,
            folder,
            size,
            memory_bytes=memory,
            spill=tmp,
            threads=threads,
            progress=tell,
        )
    signed = signature_of(source.directory / MANIFEST).exists()
    facts |= {
        "shard_set": made.manifest.shard_set,
        "files": {"made": made.made, "linked": made.linked, "copied": made.copied},
    }
    tell(f"done: {output}")
    print_answer(facts, _lines(directory, facts), as_json=as_json, quiet=quiet)
    if signed and not quiet:
        tell(f"{directory} is signed, but {output} is not; sign it with dlm privacy sign {output}")


def _facts(
    manifest: Manifest,
    plan: SlotPlan,
    shards: int,
    size: NDArray[np.int64],
    queries: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """Returns the changes as JSON values; bytes of files are estimated from bytes of slots."""
    import numpy as np

    from dlm.index.moving.plan import imbalance_of, loads_of, replicas_needed
    from dlm.index.moving.reshard import BYTES_PER_S, unchanged

    each = sum(entry.bytes for entry in manifest.files[2:]) / max(int(size.sum()), 1)
    same = unchanged(plan.before, plan.after, shards)
    after = loads_of(plan.after, size, shards)
    made = int(np.delete(after, list(same)).sum() * each)
    facts: dict[str, Any] = {
        "shards_before": manifest.shards,
        "shards": shards,
        "balanced_by": "bytes" if queries is None else "queries",
        "slots_moved": len(plan.moved),
        "bytes_moved": int(size[plan.moved].sum() * each),
        "moves": [
            {"from": old, "to": new, "slots": slots, "bytes": int(heavy * each)}
            for old, new, slots, heavy in plan.flows(size)
        ],
        "renumbered": {
            str(old): new for new, old in enumerate(plan.origin.tolist()) if old not in (-1, new)
        },
        "shards_made": shards - len(same),
        "bytes_made": made,
        "seconds": made / BYTES_PER_S,
        "imbalance_bytes": [
            imbalance_of(loads_of(plan.before, size, manifest.shards)),
            imbalance_of(after),
        ],
        "imbalance_queries": None,
        "replicas": {},
    }
    if queries is not None:
        busy = loads_of(plan.after, queries, shards)
        servers = replicas_needed(busy, queries)
        facts["imbalance_queries"] = [
            imbalance_of(loads_of(plan.before, queries, manifest.shards)),
            imbalance_of(busy),
            imbalance_of(busy, servers),
        ]
        facts["replicas"] = {
            str(shard): int(servers[shard]) for shard in np.flatnonzero(servers > 1).tolist()
        }
    return facts


def _lines(directory: Path, facts: dict[str, Any]) -> Iterator[str]:
    before, after = counted(facts["shards_before"], "shard"), facts["shards"]
    yield f"{directory}: {before} -> {after}, balanced by {facts['balanced_by']}"
    moved = counted(facts["slots_moved"], "slot")
    yield f"{moved} of 4,096 move, about {size_text(facts['bytes_moved'])}"
    moves = facts["moves"]
    for row in moves[:ROWS]:
        slots, size = counted(row["slots"], "slot"), size_text(row["bytes"])
        yield f"  shard {row['from']} -> {row['to']}: {slots}, {size}"
    if len(moves) > ROWS:
        yield f"  and {counted(len(moves) - ROWS, 'more move')}; --json lists all"
    for old, new in facts["renumbered"].items():
        yield f"shard {old} becomes shard {new}"
    made = facts["shards_made"]
    if made:
        minutes = round(facts["seconds"] / 60)
        time = f"about {counted(minutes, 'minute')}" if minutes else "less than a minute"
        yield (
            f"{counted(made, 'shard')} of {after} to make: about {size_text(facts['bytes_made'])}, "
            f"{time}"
        )
    else:
        yield "no file changes; a server that replaces another one takes over its files"
    first, last = facts["imbalance_bytes"]
    yield f"heaviest shard over the mean, bytes: {first:.3f} -> {last:.3f}"
    if facts["imbalance_queries"] is not None:
        first, last, shared = facts["imbalance_queries"]
        yield f"busiest shard over the mean, queries: {first:.3f} -> {last:.3f}"
        for shard, servers in facts["replicas"].items():
            yield (
                f"shard {shard} stays hotter than the others: run {servers} servers for it, one "
                "for each other shard"
            )
        if facts["replicas"]:
            yield f"busiest server over the mean, with these replicas: {shared:.3f}"
    if "files" in facts:
        yield f"shard set {facts['shard_set']}"
        for way, names in facts["files"].items():
            if names:
                yield f"  {way}: {', '.join(names[:ROWS])}{' ...' * (len(names) > ROWS)}"
