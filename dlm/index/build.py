"""From an ARPA file to the files of a shard set.

Two forms give the same bytes: `stream`, in bounded memory, and the plain one with the whole model
in memory (`plain`, packed by `packed`), which is its oracle and repairs models.

Paper: DLM Algorithms 2 and 3.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ConfigError
from dlm.index import layout
from dlm.index.coding import Coding, coding_of, quantised
from dlm.index.layout import Arrays, FileEntry, Manifest, offset_dtype
from dlm.index.ngrams import NgramTables, read_tables
from dlm.index.packed.low import key_bits_of, pack_low
from dlm.index.packed.tree import pack_tree
from dlm.index.plain import PlacedModel, place_model, plain_low, plain_tree, slot_bytes
from dlm.index.stream import stages
from dlm.index.stream.budget import (
    Budget,
    available_bytes,
    check_disk,
    credible_counts,
    least_bytes,
    output_bytes,
    spill_bytes,
)
from dlm.index.stream.builder import build
from dlm.index.stream.journal import JOURNAL, build_key, describe_input
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.partition import SLOTS, balanced_slot_table, check_shards

U8 = np.uint8

Progress = Callable[[str], None]


def build_shard_set(
    arpa: str | os.PathLike[str],
    output: str | os.PathLike[str],
    shards: int,
    *,
    encoding: str = "exact",
    bits: int | None = None,
    slot_load: NDArray[np.int64] | None = None,
    repair: bool = False,
    whole: bool = False,
    memory_bytes: int | None = None,
    spill: str | os.PathLike[str] | None = None,
    threads: int = 2,
    progress: Progress | None = None,
) -> Manifest:
    """Shards the model in an ARPA file.

    Args
        arpa       plain, gzip, zstd or xz
        output     folder to make; it must not exist, or be empty
        shards     how many, 1 to 4,096
        encoding   "exact", or "compact": smaller, and its values quantised
        bits       of a quantised value, or 32 to keep values as they are; of the compact encoding
                   only; see `coding.coding_of`
        slot_load  queries recorded for each slot, to balance those instead of the bytes stored
        repair     see `ngrams.read_tables`; takes the whole model into memory
        whole      take the whole model into memory: the plain form, which streams must equal
        memory_bytes  limit; None takes half of what is available, but no less than is needed. What
                   the interpreter takes is not counted, some 300 MB
        spill      folder for what does not fit in it; None: beside the output
        threads    1 or more
        progress   called with a line for each stage, and every few seconds
    Returns        the manifest
    Raises
        ArpaError, ConfigError, OSError
    Guarantees
        The folder appears whole or not at all: it is written beside, synced, and renamed.
        The same model and arguments give the same bytes, whatever the memory.
        A build of a file that spills, if it is killed or interrupted, goes on from its last
        finished stage when it is begun again with the same arguments.
    Cost
        memory: a limit that spares the words, 300 bytes each; with `repair` or `whole`, some 90
        bytes an n-gram
    """
    check_shards(shards)
    coding = coding_of(encoding, bits)
    say = progress or (lambda line: None)
    if threads < 1:
        raise ConfigError(f"--threads {threads}: give 1 or more")
    if slot_load is not None and len(slot_load) != SLOTS:
        raise ConfigError(f"a load of {len(slot_load)} slots was given, {SLOTS} expected")
    destination = Path(output)
    check_destination(destination)
    with _building(destination, spill) as place, _explained(place):
        if repair or whole:
            place.clear()
            content = _whole(place.folder, arpa, shards, coding, slot_load, repair, say)
        else:
            content = _streamed(place, arpa, shards, coding, slot_load, memory_bytes, threads, say)
        place.clear_all_but_set()
        manifest = layout.make_manifest(content)
        with (place.folder / layout.MANIFEST).open("wb") as out:
            out.write(manifest.text)
            out.flush()
            os.fsync(out.fileno())
        layout.sync_directory(place.folder)
        check_destination(destination)
        place.folder.rename(destination)  # takes the place of an empty folder, in one step
        layout.sync_directory(destination.absolute().parent)
    return manifest


def _streamed(
    place: _Place,
    arpa: str | os.PathLike[str],
    shards: int,
    coding: Coding,
    slot_load: NDArray[np.int64] | None,
    memory_bytes: int | None,
    threads: int,
    say: Progress,
) -> dict[str, Any]:
    """Writes the files of a set in bounded memory; returns the content of its manifest."""
    with ArpaReader(arpa) as reader:
        stages.check_header(reader)
        counts = credible_counts(reader)
        if memory_bytes is None:
            memory_bytes = max(available_bytes() // 2, least_bytes(counts))
        budget = Budget.of(memory_bytes, counts, threads)
        key = None
        source = describe_input(arpa) if budget.durable else None
        if source is not None:
            load = None if slot_load is None else xxhash.xxh3_128_hexdigest(slot_load.tobytes())
            key = build_key(
                source,
                {
                    "shards": shards,
                    "encoding": coding.name,
                    "bits": coding.bits,
                    "slot_load": load,
                },
            )
        place.begin(keep=key is not None)
        _check_room(place, counts, budget)
        if budget.durable:
            say(
                f"{sum(counts):,} n-grams are more than {memory_bytes:,} bytes of memory hold; "
                f"spilling to {place.spill}"
            )
        found = build(
            reader.path,
            place.folder,
            place.spill,
            shards,
            coding,
            budget,
            key=key,
            reader=reader,
            slot_load=slot_load,
            say=say,
        )
    provenance = _provenance(reader.path, found.pop("source"), coding, found.pop("quantised_from"))
    return {**_HEAD, **found, "provenance": {**provenance, "repaired": False}}


def _check_room(place: _Place, counts: Sequence[int], budget: Budget) -> None:
    """Raises `ConfigError` where a disk has too little room for what is still to be written."""
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


def _provenance(
    path: str, text: dict[str, Any], coding: Coding, quantised_from: str | None
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "source": Path(path).name,
        **text,
        "builder": f"dlm {__version__}",
    }
    if coding.bits is not None:
        out |= {"quantised_from": quantised_from, "bits": coding.bits}
    return out


def _whole(
    folder: Path,
    arpa: str | os.PathLike[str],
    shards: int,
    coding: Coding,
    slot_load: NDArray[np.int64] | None,
    repair: bool,
    say: Progress,
) -> dict[str, Any]:
    """As `_streamed`, with the whole model in memory."""
    say(f"reading {os.fspath(arpa)}")
    model, reader = read_tables(arpa, repair=repair)
    say(f"{sum(model.counts()):,} n-grams of order {model.order}; placing them")
    quantised_from = None
    if coding.bits is not None:
        say(f"quantising values to {coding.bits} bits")
        quantised_from = model.model_id()
        model = quantised(model, coding.bits)
    text = {
        "text_bytes": reader.text_bytes,
        "text_xxh3_128": reader.text_xxh3,
        "comments": list(reader.comments),
    }
    found = _write(folder, model, shards, coding, slot_load, say)
    provenance = _provenance(reader.path, text, coding, quantised_from)
    return {**_HEAD, **found, "provenance": {**provenance, "repaired": repair}}


def check_destination(destination: Path) -> None:
    """Raises `ConfigError` unless `destination` is free or an empty folder."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(
            f"{destination} exists and is not an empty folder; "
            "give another --output, or remove it first"
        )


@dataclass
class _Place:
    """Where a build writes.

    folder   the set, and the journal;  spill  everything else
    keeps    whether what is there may serve a later build
    """

    folder: Path
    spill: Path
    keeps: bool = False

    def begin(self, keep: bool) -> None:
        """Makes the folders; what an earlier build left is removed unless `keep`."""
        self.keeps = keep
        if not keep or not (self.folder / JOURNAL).exists():
            self.clear()
        self.spill.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Removes everything, and makes the folder of the set."""
        self.remove()
        self.folder.mkdir(exist_ok=True)

    def clear_all_but_set(self) -> None:
        """Removes what is no part of a finished set."""
        shutil.rmtree(self.spill, ignore_errors=True)
        (self.folder / JOURNAL).unlink(missing_ok=True)
        self.keeps = False

    def remove(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.spill, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def held_bytes(self) -> int:
        """Bytes of the files that an earlier build left."""
        folders = {self.folder, self.spill}
        return sum(p.stat().st_size for f in folders for p in f.iterdir() if p.is_file())


@contextmanager
def _building(destination: Path, spill: str | os.PathLike[str] | None) -> Iterator[_Place]:
    """Folders to write in, the set's beside `destination`, locked against a second builder.

    The lock tells a killed build from a running one. An error removes everything; a signal leaves
    what a later build can go on with.
    """
    whole = destination.absolute()
    whole.parent.mkdir(parents=True, exist_ok=True)
    folder = whole.with_name(destination.name + ".building")
    if spill is None:
        spilled = folder / "spill"
    else:
        name = xxhash.xxh3_64_hexdigest(os.fsencode(whole))
        spilled = Path(spill).absolute() / f"dlm-{destination.name}-{name}"
    place = _Place(folder, spilled)
    lock_path = whole.with_name(destination.name + ".building.lock")
    with lock_path.open("w") as lock:
        _lock(lock, lock_path, destination)
        try:
            folder.mkdir(exist_ok=True)
            yield place
        except Exception:
            place.keeps = False
            raise
        finally:
            if not place.keeps:
                place.remove()
            lock_path.unlink(missing_ok=True)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _explained(place: _Place) -> Iterator[None]:
    """Says of a full disk where it is."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _NO_ROOM or exc.filename is not None or "Free room" in str(exc):
            raise
        free = [
            f"{shutil.disk_usage(f).free:,} in {f}"
            for f in (place.folder, place.spill)
            if f.exists()
        ]
        raise OSError(
            exc.errno,
            f"{exc.strerror}: the build is given up and removed; free were {' and '.join(free)}. "
            "Free room, or give another place with --output or --tmp",
        ) from exc


def _lock(lock: IO[str], path: Path, destination: Path) -> None:
    running = ConfigError(
        f"another build of {destination} is running; wait for it, or give another --output"
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise running from exc
    # A build that just ended may have removed the file after it was opened here: such a lock
    # keeps nobody out.
    try:
        same = os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        same = False
    if not same:
        raise running


def _write(
    folder: Path,
    model: NgramTables,
    shards: int,
    coding: Coding,
    slot_load: NDArray[np.int64] | None,
    say: Progress,
) -> dict[str, Any]:
    placed = place_model(model)
    load = slot_bytes(placed)
    table = balanced_slot_table(load if slot_load is None else slot_load, shards)

    files = []

    def add(
        kind: str, index: int | None, arrays: Arrays, ngrams: int, blanks: int, nodes: int
    ) -> None:
        name = layout.file_name(kind, index)
        say(f"writing {name}")
        size, digest = layout.write_columns(folder / name, kind, arrays)
        files.append(FileEntry(kind, index, name, size, digest, ngrams, blanks, nodes))

    add("vocabulary", None, vocabulary_arrays(model), 0, 0, 0)
    counts, blanks = model.counts(), model.blanks()
    low = low_order_arrays(placed, coding)
    add("low_orders", None, low, sum(counts[:2]), sum(blanks[:2]), 0)
    for index in range(shards):
        arrays, ngrams, blank, nodes = shard_arrays(placed, table == index, coding)
        add("shard", index, arrays, ngrams, blank, nodes)

    return {
        "model": model.model_id(),
        "order": model.order,
        "counts": list(counts),
        "blanks": list(blanks),
        "unk_in_model": model.vocabulary.unk_in_model,
        "encoding": coding.name,
        "slots": table.tolist(),
        "files": [asdict(entry) for entry in files],
    }


def low_order_arrays(placed: PlacedModel, coding: Coding) -> Arrays:
    """The columns of the low orders."""
    return pack_low(plain_low(placed), coding.prob_table, coding.backoff_table)


def shard_arrays(
    placed: PlacedModel, owns: NDArray[np.bool_], coding: Coding
) -> tuple[Arrays, int, int, int]:
    """The columns of one shard, the n-grams in it, its blanks and its nodes.

    Args
        owns  (4096,) bool: the slots of this shard
    """
    model = placed.model
    levels, ngrams, blanks = plain_tree(placed, owns)
    pairs = len(model.tables[1]) if model.order > 1 else 0
    key_bits = key_bits_of(len(model.vocabulary))
    arrays = pack_tree(levels, pairs, key_bits, coding.prob_table, coding.backoff_table)
    return arrays, ngrams, blanks, sum(len(level.key) for level in levels)


def vocabulary_arrays(model: NgramTables) -> Arrays:
    words = model.vocabulary.words
    ends = np.cumsum([0, *map(len, words)], dtype=np.uint64)
    return {
        "word_begin": ends.astype(offset_dtype(int(ends[-1]))),
        "word_bytes": np.frombuffer(b"".join(words), U8),
    }
