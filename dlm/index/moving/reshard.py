"""Makes a shard set from another one of the same model, with another slot table.

Only shards whose slots change are made: the records of their roots are copied from the old set's
files, one run of bits per root. All other files are hard links.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ConfigError
from dlm.files import link_or_copy, sync_folder
from dlm.index import layout
from dlm.index.coding import coding_of_set
from dlm.index.layout import FileEntry, Manifest
from dlm.index.making.budget import LEAST_BYTES, Budget
from dlm.index.making.builder import resume, write_file
from dlm.index.making.pack import put_roots, tree_columns
from dlm.index.making.shard_set import (
    BuildFolders,
    building,
    check_destination,
    explained,
    put_in_place,
)
from dlm.index.making.stages import Context
from dlm.index.making.work import Journal, Work, build_key, describe_input
from dlm.index.moving.subtrees import SourceSet
from dlm.index.packed import kernels as packed, record_kernels as records
from dlm.index.packed.tree import codes_of, tree_shape
from dlm.index.search.shard import OPENING
from dlm.progress import ProgressReporter
from dlm.resources import check_disk

# The kernels that reshard; see jit.compile_ahead.
KERNELS = (
    *OPENING,
    records.count_records,
    records.list_roots,
    records.root_bits,
    records.put_roots,
    records.copy_bits,
    packed.put_all,
)
# Maximum bytes of memory, per root of a shard, to check a file and to list its roots.
ROOT_MEMORY = 130
WORD_MEMORY = 32  # bytes per word, for arrays that say where its 2-grams begin
# Bytes on disk for a shard's records while it is made, per byte of `SourceSet.slot_bytes`.
SPILLED = 2
# Speed at which two threads make files on a 2024 virtual machine; for estimates.
BYTES_PER_S = 16 << 20


@dataclass(frozen=True)
class Resharded:
    """A new set, and the names of its files: made, or hard-linked or copied from the old set."""

    manifest: Manifest
    made: tuple[str, ...]
    linked: tuple[str, ...]
    copied: tuple[str, ...]


def unchanged(before: NDArray[Any], after: NDArray[Any], shards: int) -> dict[int, int]:
    """Maps new shards to the old ones that have exactly the same slots, and so the same files."""
    old = {(before == shard).tobytes(): shard for shard in np.unique(before).tolist()}
    found = {shard: old.get((after == shard).tobytes()) for shard in range(shards)}
    return {shard: same for shard, same in found.items() if same is not None}


def reshard(
    source: SourceSet,
    slots: NDArray[np.uint16],
    shards: int,
    output: str | os.PathLike[str],
    slot_bytes: NDArray[np.int64],
    *,
    memory_bytes: int | None = None,
    spill: str | os.PathLike[str] | None = None,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> Resharded:
    """Makes a set of the same model in `output`, with `shards` shards and this slot table.

    Args    slots       (4096,)  the shard of each slot
            output      folder to make; it must be empty or not exist
            slot_bytes  what `source.slot_bytes` returned
            memory_bytes  limit, as in `making.build_shard_set`; mapped files are not counted
            spill       folder for one shard's records; None: beside the output
            progress    called with a line for each stage
    Raises  ConfigError, OSError, ShardFormatError
    Guarantees
        The files, byte for byte, and the name of the set are those of a build from the model's ARPA
        file with this slot table. A shard with the slots of an old shard gets the old file, as a
        hard link or, where links are not possible, as a copy.
        The folder appears whole or not at all. After a kill, a run with the same arguments
        resumes after the last finished file.
    """
    say = progress or (lambda line: None)
    destination = Path(output)
    check_destination(destination)
    if threads < 1:
        raise ConfigError(f"--threads is {threads}; expected 1 or more")
    manifest = source.manifest
    same = unchanged(manifest.slots, slots, shards)
    weight = np.zeros(shards, np.int64)
    np.add.at(weight, slots, slot_bytes)
    _check_memory(source, weight, memory_bytes)
    with building(destination, spill) as place, explained(place):
        place.begin(keep=True)
        _check_room(place, source, same, weight)
        work = Work(place.spill)
        arguments = {
            "reshard": manifest.shard_set,
            "shards": shards,
            "slots": xxhash.xxh3_128_hexdigest(np.ascontiguousarray(slots, "<u2").tobytes()),
        }
        origin = describe_input(source.directory / layout.MANIFEST)
        assert origin is not None  # the file was read
        journal = Journal(place.folder, build_key(origin, arguments))
        budget = Budget.in_memory(threads)
        resume(journal, work, place.folder, place.spill, budget, say)
        coding = coding_of_set(manifest.encoding)
        c = Context(work, budget, coding, ProgressReporter(say), place.spill)
        work.info |= {"order": manifest.order, "words": manifest.vocabulary_size}
        work.info.setdefault("files", [])
        made = _Maker(source, c, journal, place.folder)
        for kind in ("vocabulary", "low_orders"):
            made.take(manifest.file(kind), kind)
        for shard in range(shards):
            if shard in same:
                made.take(manifest.file("shard", same[shard]), "shard", shard)
            else:
                made.make(shard, slots == shard)
        content = json.loads(manifest.text)
        content |= {"slots": np.asarray(slots).tolist(), "files": work.info["files"]}
        content["provenance"] |= {
            "builder": f"dlm {__version__}",
            "resharded_from": manifest.shard_set,
        }
        ways = work.info["ways"]
        written = put_in_place(place, content, destination)
    names = {way: tuple(name for name, one in ways.items() if one == way) for way in ways.values()}
    return Resharded(
        written, names.get("made", ()), names.get("linked", ()), names.get("copied", ())
    )


class _Maker:
    """Writes the new set's files in the manifest's order; skips files that the journal lists."""

    def __init__(self, source: SourceSet, c: Context, journal: Journal, folder: Path) -> None:
        self._source, self._c, self._journal, self._folder = source, c, journal, folder
        c.work.info.setdefault("ways", {})
        self._codes = codes_of(source.shards[0].arrays)

    def take(self, entry: FileEntry, kind: str, index: int | None = None) -> None:
        """Links or copies a file of the source, perhaps under another number."""
        name = layout.file_name(kind, index)
        if name in self._journal.done:
            return
        (self._folder / name).unlink(missing_ok=True)  # a killed run may have left the file
        is_link = link_or_copy(self._source.directory / entry.name, self._folder / name)
        self._add(replace(entry, index=index, name=name), "linked" if is_link else "copied")

    def make(self, shard: int, slots: NDArray[np.bool_]) -> None:
        """Packs the file of a shard that owns these slots."""
        c, source = self._c, self._source
        name = layout.file_name("shard", shard)
        if name in self._journal.done:
            return
        holders = np.unique(source.manifest.slots[slots]).tolist()
        roots = source.roots_in(slots, holders)
        c.progress.stage(f"making {name}", len(roots), "word pairs")
        counts, _ = source.count(roots)
        pairs = tree_shape(source.shards[0].arrays["shape"]).pairs
        bits, tree, places = put_roots(
            c.work.file("tree.part"), roots.numbers, roots.ends - roots.begins, pairs
        )
        records.copy_bits(tree, places, roots.begins, roots.ends)
        c.progress.step(len(roots))
        columns = tree_columns(
            pairs,
            c.key_bits,
            self._codes,
            [(int(nodes), int(grams)) for nodes, grams, _ in counts],
            bits,
            tree,
        )
        size, digest = write_file(self._folder / name, "shard", columns, c.work)
        nodes, grams, blanks = counts.sum(axis=0).tolist()
        numbers_of = grams - blanks, blanks, nodes
        self._add(FileEntry("shard", shard, name, size, digest, *numbers_of), "made")

    def _add(self, entry: FileEntry, way: str) -> None:
        info = self._c.work.info
        info["files"] = [*info["files"], asdict(entry)]
        info["ways"][entry.name] = way
        sync_folder(self._folder)
        self._journal.save(entry.name, self._c.work)


def _check_memory(source: SourceSet, weight: NDArray[np.int64], memory_bytes: int | None) -> None:
    """Raises ConfigError if `memory_bytes` is too low for shards of about `weight` bytes."""
    roots = [tree_shape(shard.arrays["shape"]).roots for shard in source.shards]
    largest = int(weight.max()) / max(int(weight.sum()), 1)
    most = max(max(roots), int(sum(roots) * largest))
    least = LEAST_BYTES + WORD_MEMORY * source.manifest.vocabulary_size + ROOT_MEMORY * most
    if memory_bytes is not None and memory_bytes < least:
        raise ConfigError(
            f"--memory is {memory_bytes:,} bytes; the shards of this set need at least {least:,}"
        )


def _check_room(
    place: BuildFolders, source: SourceSet, same: Mapping[int, int], weight: NDArray[np.int64]
) -> None:
    files = source.manifest.files[2:]
    per_weight = sum(entry.bytes for entry in files) / max(int(weight.sum()), 1)
    made = np.delete(weight, list(same))
    needed = int(per_weight * int(made.sum()))
    if source.directory.stat().st_dev != place.folder.stat().st_dev:
        others = [*source.manifest.files[:2], *(files[old] for old in same.values())]
        needed += sum(entry.bytes for entry in others)
    spilled = SPILLED * int(made.max(initial=0))
    held = place.held_bytes()
    if place.spill.stat().st_dev == place.folder.stat().st_dev:
        check_disk(place.folder, needed + spilled - held, "resharding this set")
    else:
        check_disk(place.folder, needed - held, "the shard set")
        check_disk(place.spill, spilled, "packing the largest shard")
