"""From the n-grams of a model to the files of a shard set.

Paper: DLM Algorithms 2 and 3, with blanks, state lengths and the bit of the bigram table, which the
paper does not have (shards/FORMAT.md says what each is for).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ConfigError
from dlm.index import layout
from dlm.index.layout import Arrays, FileEntry, Manifest, offset_dtype
from dlm.index.ngrams import NgramTables, pack_keys, read_tables
from dlm.ngram.partition import SLOTS, balanced_slot_table, check_shards, slots_of
from dlm.ngram.vocab import UNK_ID

I64 = np.int64
U8 = np.uint8

Progress = Callable[[str], None]


@dataclass
class Contexts:
    """The contexts of one length that are nodes of the tree, in the order of the whole tree.

    rank   place of each among the n-grams of its length; node  rank -> node, -1 for none
    parent node one level up (the context without its oldest word); slot  (n,) of its two last words
    """

    rank: NDArray[np.int64]
    node: NDArray[np.int64]
    parent: NDArray[np.int64]
    slot: NDArray[np.uint16]


def build_shard_set(
    arpa: str | os.PathLike[str],
    output: str | os.PathLike[str],
    shards: int,
    *,
    slot_load: NDArray[np.int64] | None = None,
    repair: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Shards the model in an ARPA file.

    Args
        arpa       plain, gzip, zstd or xz
        output     folder to make; it must not exist, or be empty
        shards     how many, 1 to 4,096
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
        manifest = _write(folder, model, shards, slot_load, provenance, say)
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
    slot_load: NDArray[np.int64] | None,
    provenance: dict[str, Any],
    say: Progress,
) -> Manifest:
    order = model.order
    state_length = state_lengths(model)
    contexts = place_contexts(model)
    stored = np.zeros(len(model.tables[1]) if order > 1 else 0, np.bool_)
    if contexts:
        stored[contexts[0].rank] = True

    load = _slot_bytes(model, contexts)
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
    add(
        "low_orders",
        None,
        low_order_arrays(model, state_length, stored),
        sum(counts[:2]),
        sum(blanks[:2]),
        0,
    )
    for index in range(shards):
        arrays, ngrams, blank = shard_arrays(model, contexts, state_length, table == index)
        add("shard", index, arrays, ngrams, blank, len(arrays["node_key"]))

    manifest = layout.make_manifest(
        {
            "format": layout.FORMAT_NAME,
            "format_version": layout.FORMAT_VERSION,
            "features": [],
            "model": model.model_id(),
            "order": order,
            "counts": list(counts),
            "blanks": list(blanks),
            "unk_in_model": model.vocabulary.unk_in_model,
            "encoding": "exact",
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


def state_lengths(model: NgramTables) -> list[NDArray[np.uint8]]:
    """How many words of each n-gram can still matter to the right of it, by order.

    An n-gram matters if it is the beginning of a longer one, blanks included, or has a back-off
    weight; KenLM's states keep just these (Heafield 2011, section 4.1, "minimising states").
    """
    lengths: list[NDArray[np.uint8]] = []
    for k, table in enumerate(model.tables, 1):
        if k == 1:
            shorter = np.zeros(len(table), U8)
        else:
            suffix = suffix_ranks(model, k)
            shorter = lengths[-1][suffix]
        if k < model.order:
            matters = table.log10_backoff != 0
            matters[model.tables[k].prefix] = True
            if k == 1 and not model.vocabulary.unk_in_model:
                matters[UNK_ID] = True  # as KenLM does; see ngram.backoff.DictModel
            lengths.append(np.where(matters, U8(k), shorter).astype(U8))
        else:
            lengths.append(shorter)
    return lengths


def suffix_ranks(model: NgramTables, k: int) -> NDArray[np.int64]:
    """Rank, one order down, of each n-gram of order `k` without its oldest word."""
    return model.ranks(model.tables[k - 1].rows[:, 1:])


def place_contexts(model: NgramTables) -> list[Contexts]:
    """The nodes of the tree, level by level: contexts of 2 .. order - 1 words.

    A context is a node if something follows it, if it is longer than two words and has a back-off
    weight, or if a longer node hangs below it.
    """
    wanted: list[NDArray[np.bool_]] = []
    suffixes: list[NDArray[np.int64]] = []
    for k in range(2, model.order):
        table = model.tables[k - 1]
        keep = (table.log10_backoff != 0) if k > 2 else np.zeros(len(table), np.bool_)
        keep[model.tables[k].prefix] = True
        wanted.append(keep)
        suffixes.append(suffix_ranks(model, k))
    for i in range(len(wanted) - 1, 0, -1):
        wanted[i - 1][suffixes[i][wanted[i]]] = True

    levels: list[Contexts] = []
    for i, keep in enumerate(wanted):
        rank = np.flatnonzero(keep).astype(I64)
        rows = model.tables[i + 1].rows
        if i == 0:
            parent = np.zeros(len(rank), I64)
            slot = slots_of(rows[rank, 0], rows[rank, 1])
        else:
            parent = levels[-1].node[suffixes[i][rank]]
            place = np.argsort(pack_keys(parent, rows[rank, 0]), kind="stable")
            rank, parent = rank[place], parent[place]
            slot = levels[-1].slot[parent]
        node = np.full(len(rows), -1, I64)
        node[rank] = np.arange(len(rank))
        levels.append(Contexts(rank, node, parent, slot))
    return levels


# Bytes a node and an n-gram take in a shard, offsets of 32 bits; the balance goes by these.
NODE_BYTES = 16
GRAM_BYTES = 9


def _slot_bytes(model: NgramTables, contexts: list[Contexts]) -> NDArray[np.int64]:
    """Bytes stored under each slot."""
    load = np.zeros(SLOTS, I64)
    for i, level in enumerate(contexts):
        load += NODE_BYTES * np.bincount(level.slot, minlength=SLOTS)
        node = level.node[model.tables[i + 2].prefix]
        load += GRAM_BYTES * np.bincount(level.slot[node], minlength=SLOTS)
    return load


def vocabulary_arrays(model: NgramTables) -> Arrays:
    words = model.vocabulary.words
    ends = np.cumsum([0, *map(len, words)], dtype=np.uint64)
    return {
        "word_begin": ends.astype(offset_dtype(int(ends[-1]))),
        "word_bytes": np.frombuffer(b"".join(words), U8),
    }


def _meta(
    state_length: NDArray[np.uint8], blank: NDArray[np.bool_], stored: NDArray[np.bool_] | None
) -> NDArray[np.uint8]:
    meta = state_length | np.where(blank, U8(layout.BLANK), U8(0))
    if stored is not None:
        meta |= np.where(stored, U8(layout.STORED), U8(0))
    return meta.astype(U8)


def _begins(parent: NDArray[np.int64], parents: int) -> NDArray[Any]:
    """Where the children of each parent begin, children sorted by parent, and the end."""
    begins = np.zeros(parents + 1, I64)
    np.cumsum(np.bincount(parent, minlength=parents), out=begins[1:])
    return begins


def low_order_arrays(
    model: NgramTables, state_length: list[NDArray[np.uint8]], stored: NDArray[np.bool_]
) -> Arrays:
    one = model.tables[0]
    out: Arrays = {
        "unigram_log10_prob": one.log10_prob,
        "unigram_backoff": one.log10_backoff,
        "unigram_meta": _meta(state_length[0], one.blank, None),
    }
    if model.order > 1:
        two = model.tables[1]
        begins = _begins(two.prefix, len(one))
        meta = _meta(state_length[1], two.blank, stored)
        word, prob, backoff = two.rows[:, 1], two.log10_prob, two.log10_backoff
    else:
        begins = np.zeros(len(one) + 1, I64)
        meta = np.zeros(0, U8)
        word = np.zeros(0, np.uint32)
        prob = backoff = np.zeros(0, np.float32)
    out |= {
        "bigram_begin": begins.astype(offset_dtype(int(begins[-1]))),
        "bigram_word": word,
        "bigram_log10_prob": prob,
        "bigram_backoff": backoff,
        "bigram_meta": meta,
    }
    return out


def shard_arrays(
    model: NgramTables,
    contexts: list[Contexts],
    state_length: list[NDArray[np.uint8]],
    owns: NDArray[np.bool_],
) -> tuple[Arrays, int, int]:
    """The columns of one shard, the n-grams in it and its blanks.

    Args
        owns  (4096,) bool: the slots of this shard
    """
    keys, backoffs, children, grams = [], [], [], []
    words, probs, metas = [], [], []
    level_begin = [0]
    ngram_total = blank_total = gram_end = 0
    mine = [np.flatnonzero(owns[level.slot]).astype(I64) for level in contexts]
    for i, level in enumerate(contexts):
        nodes = mine[i]
        local = np.full(len(level.rank), -1, I64)
        local[nodes] = np.arange(len(nodes))
        table = model.tables[i + 1]
        rank = level.rank[nodes]
        # A root is named by its place in the bigram table, a deeper node by its oldest word.
        keys.append(rank.astype(np.uint32) if i == 0 else table.rows[rank, 0])
        backoffs.append(table.log10_backoff[rank])

        begin = level_begin[-1] + len(nodes)
        level_begin.append(begin)
        if i + 1 < len(contexts):
            child_parent = local[contexts[i + 1].parent[mine[i + 1]]]
            children.append(begin + _begins(child_parent, len(nodes))[:-1])
        else:
            children.append(np.full(len(nodes), begin, I64))

        longer = model.tables[i + 2]
        node = level.node[longer.prefix]
        gram = np.flatnonzero(owns[level.slot[node]])
        home = local[node[gram]]
        gram = gram[np.argsort(pack_keys(home, longer.rows[gram, -1]), kind="stable")]
        begins = _begins(home, len(nodes))
        grams.append(gram_end + begins[:-1])
        gram_end += len(gram)
        words.append(longer.rows[gram, -1])
        probs.append(longer.log10_prob[gram])
        metas.append(_meta(state_length[i + 2][gram], longer.blank[gram], None))
        blank_here = int(longer.blank[gram].sum())
        blank_total += blank_here
        ngram_total += len(gram) - blank_here

    def join(parts: list[Any], dtype: Any) -> NDArray[Any]:
        return np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype)

    total = level_begin[-1]
    return (
        {
            "level_begin": np.array(level_begin, np.uint64),
            "node_key": join(keys, np.uint32),
            "node_backoff": join(backoffs, np.float32),
            "node_child": join([*children, [total]], offset_dtype(total)),
            "node_gram": join([*grams, [gram_end]], offset_dtype(gram_end)),
            "gram_word": join(words, np.uint32),
            "gram_log10_prob": join(probs, np.float32),
            "gram_meta": join(metas, U8),
        },
        ngram_total,
        blank_total,
    )
