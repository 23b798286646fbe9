"""Builds a shard set from an ARPA file: either the complete folder or nothing.

`builder` makes the files. This module handles the folder and its lock, the memory limit, disk
space, repair, and the manifest, which is written last.

Paper: DLM Algorithms 2 and 3.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ConfigError
from dlm.files import NO_ROOM, locked, move, remove_leftovers, scratch_folder, sync_folder
from dlm.index import layout
from dlm.index.coding import Coding, coding_of
from dlm.index.layout import Manifest
from dlm.index.making import kernels as joining, stages
from dlm.index.making.budget import (
    Budget,
    credible_counts,
    least_bytes,
    output_bytes,
    spill_bytes,
)
from dlm.index.making.builder import build, source_of
from dlm.index.making.work import JOURNAL, build_key, describe_input
from dlm.index.ngrams import read_raw, sorted_tables, with_prefixes
from dlm.index.packed import kernels as packed, record_kernels as records
from dlm.index.settings import ShardSettings
from dlm.kenlm.open import open_ngrams
from dlm.ngram import kernels as reading
from dlm.ngram.arpa import rows, write_arpa
from dlm.ngram.partition import SLOTS
from dlm.resources import available_bytes, check_disk
from dlm.spill import kernels as sorting

# The kernels that make a shard set in the exact encoding; see jit.compile_ahead.
KERNELS = (
    joining.join,
    sorting.refine,
    *rows.KERNELS,
    reading.enter_words,
    joining.route,
    packed.put_key_lists,
    packed.hash_ngrams,
    records.size_records,
    records.root_bits,
    records.put_roots,
    records.put_records,
    reading.find_words,
    sorting.pack,
    joining.suffix_rows,
    sorting.column_range,
    packed.key_list_bits,
    packed.put_all,
    sorting.gather,
)


def build_shard_set(
    arpa: str | os.PathLike[str],
    output: str | os.PathLike[str],
    shards: int,
    *,
    encoding: str = "exact",
    bits: int | None = None,
    slot_load: NDArray[np.int64] | None = None,
    slots: NDArray[np.uint16] | None = None,
    repair: bool = False,
    memory_bytes: int | None = None,
    spill: str | os.PathLike[str] | None = None,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> Manifest:
    """Shards the model in an ARPA file, or in a KenLM binary file.

    Args
        arpa       an ARPA file, plain, gzip, zstd or xz; or a KenLM binary file
        output     folder to make; if it exists, it must be empty
        encoding   "exact", or "compact": smaller, and its values quantised
        bits       bits of a quantised value, or 32 to keep values as they are; compact only
        slot_load  queries recorded for each slot, which are balanced instead of the bytes stored
        slots      (4096,) the shard of each slot, instead of a balanced table
        repair     add missing prefixes (`ngrams.with_prefixes`); the model is first rewritten with
                   them, which needs the whole model in memory
        memory_bytes  limit; None takes half of the available memory, or what is needed if that is
                   more. Some 300 MB for the interpreter are not counted
        spill      folder for data that exceeds the limit; None: beside the output
        progress   called with a line for each stage, and every few seconds
    Raises  ArpaError, ConfigError, OSError
    Guarantees
        The folder appears complete or not at all: it is written next to `output`, synced and
        renamed. The same model and arguments give the same bytes, whatever the memory.
        If a build from a file spills and is killed, the same call resumes at its unfinished stage.
    Cost    memory: the limit, which must hold the words, 300 bytes each, and the word pairs of as
            many shards as threads, 30 bytes each; with `repair`, first some 400 bytes per n-gram
    """
    ShardSettings(shards)
    coding = coding_of(encoding, bits)
    say = progress or (lambda line: None)
    if threads < 1:
        raise ConfigError(f"--threads is {threads}; expected 1 or more")
    if slot_load is not None and len(slot_load) != SLOTS:
        raise ConfigError(f"slot_load has {len(slot_load)} slots; expected {SLOTS}")
    if slots is not None and (len(slots) != SLOTS or not 0 <= slots.min() <= slots.max() < shards):
        raise ConfigError(
            f"slots has {len(slots)} entries with shards up to {slots.max()}; expected {SLOTS} "
            f"entries, and shards 0 to {shards - 1}"
        )
    destination = Path(output)
    check_destination(destination)
    with building(destination, spill) as place, explained(place), ExitStack() as stack:
        original = None
        if repair:
            place.clear()
            parent = place.repaired.parent
            parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch_folder(parent, place.repaired.name))
            source, arpa = arpa, folder / "model.arpa.zst"
            original = _repair(source, arpa, say)
        content = _streamed(
            place, arpa, original, shards, coding, slot_load, slots, memory_bytes, threads, say
        )
        return put_in_place(place, content, destination)


def put_in_place(place: BuildFolders, content: dict[str, Any], destination: Path) -> Manifest:
    """Writes the manifest, and renames the folder, whose other files are complete."""
    place.clear_all_but_set()
    manifest = layout.make_manifest({**_HEAD, **content})
    with (place.folder / layout.MANIFEST).open("wb") as out:
        out.write(manifest.text)
        out.flush()
        os.fsync(out.fileno())
    sync_folder(place.folder)
    check_destination(destination)
    move(place.folder, destination)  # takes the place of an empty folder
    return manifest


def _streamed(
    place: BuildFolders,
    arpa: str | os.PathLike[str],
    original: dict[str, Any] | None,
    shards: int,
    coding: Coding,
    slot_load: NDArray[np.int64] | None,
    slots: NDArray[np.uint16] | None,
    memory_bytes: int | None,
    threads: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Writes files in bounded memory; returns manifest content. `original`: `_repair`'s or None."""
    search = None if memory_bytes is None else memory_bytes // 4
    folder = place.spill.parent
    with open_ngrams(arpa, memory_bytes=search, folder=folder, progress=say) as reader:
        if original is None:  # otherwise, `_repair` has checked the header
            stages.check_header(reader)
        counts = credible_counts(reader)
        if memory_bytes is None:
            memory_bytes = max(available_bytes() // 2, least_bytes(counts, shards, threads))
        budget = Budget.of(memory_bytes, counts, threads, shards)
        key = None
        # A repaired model is rewritten each time, so there is nothing to resume from.
        source = describe_input(arpa) if budget.durable and original is None else None
        if source is not None:
            load, table = (
                None if array is None else xxhash.xxh3_128_hexdigest(array.tobytes())
                for array in (slot_load, slots)
            )
            key = build_key(
                source,
                {
                    "shards": shards,
                    "encoding": coding.name,
                    "bits": coding.bits,
                    "slot_load": load,
                    "slots": table,
                },
            )
        place.begin(keep=key is not None)
        _check_room(place, counts, budget)
        if budget.durable:
            say(
                f"{sum(counts):,} n-grams do not fit in {memory_bytes:,} bytes of memory; spilling "
                f"to {place.spill}"
            )
        found = build(
            reader,
            place.folder,
            place.spill,
            shards,
            coding,
            budget,
            key=key,
            slot_load=slot_load,
            slots=slots,
            say=say,
        )
    provenance = {"source": Path(reader.path).name, **found.pop("source"), **(original or {})}
    provenance |= {"builder": f"dlm {__version__}", "repaired": original is not None}
    quantised_from = found.pop("quantised_from")
    if coding.bits is not None:
        provenance |= {"quantised_from": quantised_from, "bits": coding.bits}
    return {**found, "provenance": provenance}


def _repair(arpa: str | os.PathLike[str], path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes the model in `arpa` to `path`, with missing prefixes added; returns source facts.

    Faults raise ArpaError here, with their lines in `arpa`; the builder then finds no faults.
    """
    say(f"reading {os.fspath(arpa)} to repair it")
    with open_ngrams(arpa, progress=say) as reader:
        stages.check_header(reader)
        raw = read_raw(reader)
        raw = with_prefixes(reader.vocabulary, raw)
        sorted_tables(reader.vocabulary, raw, reader)
    say("writing the repaired model")
    write_arpa(path, reader.vocabulary, raw)
    return {"source": Path(reader.path).name, **source_of(reader)}


def _check_room(place: BuildFolders, counts: Sequence[int], budget: Budget) -> None:
    held = place.held_bytes()
    output = output_bytes(counts)
    spilled = spill_bytes(counts) if budget.durable else 0
    if place.spill.stat().st_dev == place.folder.stat().st_dev:
        check_disk(place.folder, output + spilled - held, "sharding this model")
    else:
        check_disk(place.folder, output - held, "the shard set")
        check_disk(place.spill, spilled - held, "sorting this model")


_HEAD = {
    "format": layout.FORMAT_NAME,
    "format_version": layout.FORMAT_VERSION,
    "features": [],
}


def check_destination(destination: Path) -> None:
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(
            f"{destination} exists and is not an empty folder; "
            "give another --output, or remove this one first"
        )


@dataclass
class BuildFolders:
    """The folders that a build writes to.

    folder    for the set and the journal
    spill     for everything else
    repaired  path beside which a repaired model's temporary folder is made
    keeps     whether a later build may use the existing files
    """

    folder: Path
    spill: Path
    repaired: Path
    keeps: bool = False

    def begin(self, keep: bool) -> None:
        """Makes the folders; removes what an earlier build left, unless `keep`."""
        self.keeps = keep
        if not keep or not (self.folder / JOURNAL).exists():
            self.clear()
        self.spill.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.spill, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)

    def clear_all_but_set(self) -> None:
        shutil.rmtree(self.spill, ignore_errors=True)
        (self.folder / JOURNAL).unlink(missing_ok=True)
        self.keeps = False

    def remove(self) -> None:
        shutil.rmtree(self.spill, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def held_bytes(self) -> int:
        folders = {self.folder, self.spill}
        return sum(p.stat().st_size for f in folders for p in f.iterdir() if p.is_file())


@contextmanager
def building(destination: Path, spill: str | os.PathLike[str] | None) -> Iterator[BuildFolders]:
    """Yields the folders to write in; the set's folder, beside `destination`, is locked meanwhile.

    The lock distinguishes a killed build from a running one. An error removes everything; a signal
    leaves what a later build can resume from.
    """
    whole = destination.absolute()
    whole.parent.mkdir(parents=True, exist_ok=True)
    folder = whole.with_name(destination.name + ".building")
    if spill is None:
        spilled = folder / "spill"
    else:
        name = xxhash.xxh3_64_hexdigest(os.fsencode(whole))
        spilled = Path(spill).absolute() / f"dlm-{destination.name}-{name}"
    beside = folder if spill is None else spilled
    place = BuildFolders(folder, spilled, beside.with_name(beside.name + ".repaired"))
    running = ConfigError(
        f"another build of {destination} is running; wait for it, or give another --output"
    )
    with locked(whole.with_name(destination.name + ".building.lock"), running, remove=True):
        try:
            remove_leftovers(place.repaired)
            folder.mkdir(exist_ok=True)
            yield place
        except Exception:
            place.keeps = False
            raise
        finally:
            if not place.keeps:
                place.remove()


@contextmanager
def explained(place: BuildFolders) -> Iterator[None]:
    """Adds the file, and the free space of each disk, to the error that a full disk raises."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in NO_ROOM or "Free space" in str(exc):
            raise
        what = "" if exc.filename is None else f" for {exc.filename}"
        free = [
            f"{shutil.disk_usage(f).free:,} in {f}"
            for f in (place.folder, place.spill)
            if f.exists()
        ]
        raise OSError(
            exc.errno,
            f"{exc.strerror}{what}: the build was stopped and its files removed. Bytes free then: "
            f"{' and '.join(free)}. Free space, or name another disk with --output or --tmp",
        ) from exc
