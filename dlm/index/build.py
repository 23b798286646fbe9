"""From the n-grams of a model to the files of a shard set.

Paper: DLM Algorithms 2 and 3 (`plain`), packed (`packed`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
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
from dlm.ngram.partition import balanced_slot_table, check_shards

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
    progress: Progress | None = None,
) -> Manifest:
    """Shards the model in an ARPA file.

    Args
        arpa       plain, gzip, zstd or xz
        output     folder to make; it must not exist, or be empty
        shards     how many, 1 to 4,096
        encoding   "exact", or "compact": smaller, and its values quantised
        bits       of a quantised value, 2 to 16, or 32 to keep values as they are; of the compact
                   encoding only, which takes 8 where none is given
        slot_load  queries recorded for each slot, to balance those instead of the bytes stored
        repair     see `ngrams.read_tables`
        progress   called with a line for each stage
    Returns        the manifest
    Raises
        ArpaError, ConfigError, OSError
    Guarantees
        The folder appears whole or not at all: it is written beside, synced, and renamed.
        The same model and arguments give the same bytes.
    """
    check_shards(shards)
    coding = coding_of(encoding, bits)
    say = progress or (lambda line: None)
    destination = Path(output)
    check_destination(destination)
    with _building(destination) as folder:
        say(f"reading {os.fspath(arpa)}")
        model, reader = read_tables(arpa, repair=repair)
        say(f"{sum(model.counts()):,} n-grams of order {model.order}; placing them")
        provenance: dict[str, Any] = {
            "source": Path(reader.path).name,
            "text_bytes": reader.text_bytes,
            "text_xxh3_128": reader.text_xxh3,
            "comments": list(reader.comments),
            "builder": f"dlm {__version__}",
            "repaired": repair,
        }
        if coding.bits is not None:
            say(f"quantising values to {coding.bits} bits")
            provenance |= {"quantised_from": model.model_id(), "bits": coding.bits}
            model = quantised(model, coding.bits)
        manifest = _write(folder, model, shards, coding, slot_load, provenance, say)
        check_destination(destination)
        folder.rename(destination)  # takes the place of an empty folder, in one step
        layout.sync_directory(destination.absolute().parent)
    return manifest


def check_destination(destination: Path) -> None:
    """Raises `ConfigError` unless `destination` is free or an empty folder."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(
            f"{destination} exists and is not an empty folder; "
            "give another --output, or remove it first"
        )


@contextmanager
def _building(destination: Path) -> Iterator[Path]:
    """A folder beside `destination` to write in, locked against a second builder.

    What a killed build left there is removed; the lock tells a killed build from a running one.
    """
    destination.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = destination.absolute().with_name(destination.name + ".building")
    lock_path = destination.absolute().with_name(destination.name + ".building.lock")
    with lock_path.open("w") as lock:
        _lock(lock, lock_path, destination)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock_path.unlink(missing_ok=True)


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
    provenance: dict[str, Any],
    say: Progress,
) -> Manifest:
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

    manifest = layout.make_manifest(
        {
            "format": layout.FORMAT_NAME,
            "format_version": layout.FORMAT_VERSION,
            "features": [],
            "model": model.model_id(),
            "order": model.order,
            "counts": list(counts),
            "blanks": list(blanks),
            "unk_in_model": model.vocabulary.unk_in_model,
            "encoding": coding.name,
            "slots": table.tolist(),
            "files": [asdict(entry) for entry in files],
            "provenance": provenance,
        }
    )
    with (folder / layout.MANIFEST).open("wb") as out:
        out.write(manifest.text)
        out.flush()
        os.fsync(out.fileno())
    layout.sync_directory(folder)
    return manifest


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
