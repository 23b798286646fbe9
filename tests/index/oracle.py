"""The builder with the whole model in memory: the oracle of the one that streams.

Plain arrays from beginning to end: the n-grams sorted and closed under suffixes, the tree of each
shard, its columns packed whole. It shares with `dlm.index` what reads (names of files, n-gram
tables, widths), and nothing that builds.

Paper: DLM Algorithms 2 and 3, with blanks and with the two bits that the paper does not have:
what is extended and what is stored (shards/FORMAT.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlm import __version__
from dlm.errors import ArpaError
from dlm.index import layout
from dlm.index.coding import Coding, codebook, coding_of, weight_bits
from dlm.index.layout import (
    COLUMNS,
    FORMAT_VERSION,
    MAX_ORDER,
    Arrays,
    FileEntry,
    Manifest,
    file_checksum,
)
from dlm.index.ngrams import (
    NgramTables,
    OrderTable,
    begins_of,
    pack_keys,
    read_raw,
    sorted_tables,
    with_prefixes,
)
from dlm.index.packed import kernels
from dlm.index.packed.columns import (
    Offsets,
    bits_of,
    pack_fields,
    room,
)
from dlm.index.packed.kernels import OFFSET_BLOCK
from dlm.index.packed.low import (
    BLANK,
    PAIR_FLAG_BITS,
    STORED,
    LowPlain,
    key_bits_of,
    keys_of,
)
from dlm.index.packed.tree import (
    LEVEL_COLUMNS,
    TABLES,
    LevelPlain,
    root_key_bits_of,
)
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.partition import balanced_slot_table, slots_of
from dlm.ngram.vocab import UNK_ID

I64 = np.int64
F32 = np.float32
U8 = np.uint8
U32 = np.uint32
# Bytes a node and an n-gram take in a shard, about; the balance goes by these.
NODE_BYTES = 6
GRAM_BYTES = 6


def build_whole(
    arpa: str | os.PathLike[str],
    output: str | os.PathLike[str],
    shards: int,
    *,
    encoding: str = "exact",
    bits: int | None = None,
    slot_load: NDArray[np.int64] | None = None,
    repair: bool = False,
) -> Manifest:
    """What `dlm.index.making.build_shard_set` writes, made with everything in memory."""
    coding = coding_of(encoding, bits)
    model, reader = read_tables(arpa, repair=repair)
    quantised_from = None
    if coding.bits is not None:
        quantised_from = model.model_id()
        model = quantised(model, coding.bits)
    folder = Path(output)
    folder.mkdir()
    found = _write(folder, model, shards, coding, slot_load)
    provenance: dict[str, Any] = {
        "source": Path(reader.path).name,
        "text_bytes": reader.text_bytes,
        "text_xxh3_128": reader.text_xxh3,
        "comments": list(reader.comments),
        "builder": f"dlm {__version__}",
        "repaired": repair,
    }
    if coding.bits is not None:
        provenance |= {"quantised_from": quantised_from, "bits": coding.bits}
    manifest = layout.make_manifest(
        {
            "format": layout.FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "features": [],
            **found,
            "provenance": provenance,
        }
    )
    (folder / layout.MANIFEST).write_bytes(manifest.text)
    return manifest


def read_tables(
    path: str | os.PathLike[str], *, repair: bool = False
) -> tuple[NgramTables, ArpaReader]:
    """The model in an ARPA file, sorted and closed under suffixes; and the reader, consumed.

    Args
        repair  put in prefixes that are missing, with the probability that back-off gives them and
                no back-off weight. The score of an n-gram stays the same bit for bit where the
                prefix's context is asked alone; a longer context may differ in the last bit, since
                its back-off weights are now added to a sum that was rounded once before
    Raises
        ArpaError  malformed; an n-gram that stands twice; a missing prefix without `repair`, or one
                   to which back-off gives a probability above 1
    Cost
        memory: some 90 bytes per n-gram at its peak
    """
    with ArpaReader(path) as reader:
        if reader.order > MAX_ORDER:
            raise ArpaError(
                f"the model has order {reader.order}; shards hold at most order {MAX_ORDER}",
                path=reader.path,
            )
        raw = read_raw(reader)
        vocabulary = reader.vocabulary
    if repair:
        raw = with_prefixes(vocabulary, raw)
    tables = sorted_tables(vocabulary, raw, reader)
    close_under_suffixes(tables)
    return tables, reader


def close_under_suffixes(model: NgramTables) -> None:
    """Adds a blank for every suffix of an n-gram that the model lacks, in place.

    Guarantees  closed under prefixes before means closed under prefixes after: the prefix of a
                suffix is a suffix of the prefix
    """
    wanted = np.zeros((0, model.order), U32)
    blanks: list[NDArray[np.uint32]] = []
    for k in range(model.order, 2, -1):
        rows = np.concatenate([model.tables[k - 1].rows[:, 1:], wanted[:, 1:]])
        missing = rows[model.ranks(rows) < 0]
        wanted = np.unique(missing, axis=0) if len(missing) else np.zeros((0, k - 1), U32)
        blanks.append(wanted)
    if not any(len(rows) for rows in blanks):
        return
    for k, rows in enumerate(reversed(blanks), 2):
        table = model.tables[k - 1]
        size = len(rows)
        all_rows = np.concatenate([table.rows, rows])
        # Ranks one order down may have moved, so the keys are made anew even where nothing came.
        prefix = model.ranks(all_rows[:, :-1])
        place = np.argsort(model.sort_keys(prefix, all_rows[:, -1]), kind="stable")
        model.tables[k - 1] = OrderTable(
            all_rows[place],
            np.concatenate([table.log10_prob, np.zeros(size, F32)])[place],
            np.concatenate([table.log10_backoff, np.zeros(size, F32)])[place],
            np.concatenate([table.blank, np.ones(size, np.bool_)])[place],
            prefix[place],
        )
    # The top order has no blanks, and the order of its rows stands; only its prefixes moved.
    model.tables[-1].prefix = model.ranks(model.tables[-1].rows[:, :-1])


def quantised(model: NgramTables, bits: int) -> NgramTables:
    """`model` with at most 2**bits probabilities and 2**weight_bits(bits) weights an
    order.

    Order 1 stays as it is, as in KenLM: it is small, and every back-off ends there. Its n-grams
    would share codes by their number, while a few frequent words carry most of the text.
    """
    tables = model.tables[:1]
    for table in model.tables[1:]:
        prob = table.log10_prob.copy()
        keep = ~table.blank
        prob[keep] = quantise(prob[keep], bits)
        weight = quantise(table.log10_backoff, weight_bits(bits))
        tables.append(replace(table, log10_prob=prob, log10_backoff=weight))
    return NgramTables(model.vocabulary, tables)


def quantise(values: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Each value replaced by the nearest of a codebook of at most 2**bits."""
    out = values.copy()
    own = ~((values == 0) | ~np.isfinite(values))
    specials = len(np.unique(values[~own]))
    distinct, inverse, counts = np.unique(values[own], return_inverse=True, return_counts=True)
    room = (1 << bits) - specials
    if len(distinct) <= room:
        return out
    book, code = codebook(distinct.astype(np.float64), counts, room)
    out[own] = book[code][inverse]
    return out


@dataclass(frozen=True, eq=False)
class Contexts:
    """The contexts of one length that are nodes of the tree, in the order of the whole tree.

    rank   place of each among the n-grams of its length; node  rank -> node, -1 for none
    parent node one level up (the context without its oldest word); slot  (n,) of its two last words
    """

    rank: NDArray[np.int64]
    node: NDArray[np.int64]
    parent: NDArray[np.int64]
    slot: NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class PlacedModel:
    """A model with everything that the tree needs to know of each n-gram.

    Shapes, by order from 1
        extended  (n,)      bool   whether the n-gram matters to the right of itself
        suffix    (n,)      int64  rank, one order down, of the n-gram without its oldest word
        begin     (m + 1,)  int64  n-grams whose prefix is each n-gram one order down
    """

    model: NgramTables
    extended: list[NDArray[np.bool_]]
    suffix: list[NDArray[np.int64]]
    begin: list[NDArray[np.int64]]
    contexts: list[Contexts]


def place_model(model: NgramTables) -> PlacedModel:
    """Everything that does not depend on the number of shards."""
    suffix = [np.zeros(len(model.tables[0]), I64)]
    suffix += [model.ranks(table.rows[:, 1:]) for table in model.tables[1:]]
    begin = [np.array([0, len(model.tables[0])], I64)]
    begin += [begins_of(longer.prefix, len(shorter)) for shorter, longer in pairwise(model.tables)]
    return PlacedModel(model, extended_flags(model), suffix, begin, place_contexts(model, suffix))


def extended_flags(model: NgramTables) -> list[NDArray[np.bool_]]:
    """Whether each n-gram matters to the right of itself, by order.

    It does if it is the beginning of a longer one, blanks included, or has a back-off weight;
    KenLM's states keep just these (Heafield 2011, section 4.1, "minimising states").
    """
    flags = []
    for k, table in enumerate(model.tables, 1):
        if k == model.order:
            flags.append(np.zeros(len(table), np.bool_))
            continue
        matters = table.log10_backoff != 0
        matters[model.tables[k].prefix] = True
        if k == 1 and not model.vocabulary.unk_in_model:
            matters[UNK_ID] = True  # as KenLM does; see ngram.backoff.DictModel
        flags.append(matters)
    return flags


def place_contexts(model: NgramTables, suffix: list[NDArray[np.int64]]) -> list[Contexts]:
    """The nodes of the tree, level by level: contexts of 2 .. order - 1 words.

    A context is a node if something follows it, if it is longer than two words and has a back-off
    weight, or if a longer node hangs below it.
    """
    wanted: list[NDArray[np.bool_]] = []
    for k in range(2, model.order):
        table = model.tables[k - 1]
        keep = (table.log10_backoff != 0) if k > 2 else np.zeros(len(table), np.bool_)
        keep[model.tables[k].prefix] = True
        wanted.append(keep)
    for i in range(len(wanted) - 1, 0, -1):
        wanted[i - 1][suffix[i + 1][wanted[i]]] = True

    key_bits = key_bits_of(len(model.vocabulary))
    levels: list[Contexts] = []
    for i, keep in enumerate(wanted):
        rank = np.flatnonzero(keep).astype(I64)
        rows = model.tables[i + 1].rows
        if i == 0:
            parent = np.zeros(len(rank), I64)
            slot = slots_of(rows[rank, 0], rows[rank, 1])
        else:
            parent = levels[-1].node[suffix[i + 1][rank]]
            place = np.argsort(pack_keys(parent, keys_of(rows[rank, 0], key_bits)), kind="stable")
            rank, parent = rank[place], parent[place]
            slot = levels[-1].slot[parent]
        node = np.full(len(rows), -1, I64)
        node[rank] = np.arange(len(rank))
        levels.append(Contexts(rank, node, parent, slot))
    return levels


def plain_low(placed: PlacedModel) -> LowPlain:
    """The low orders."""
    model = placed.model
    one = model.tables[0]
    if model.order == 1:
        return LowPlain(
            one.log10_prob,
            one.log10_backoff,
            placed.extended[0],
            np.zeros(len(one) + 1, I64),
            np.zeros(0, np.uint32),
            np.zeros(0, np.float32),
            np.zeros(0, np.float32),
            np.zeros(0, U8),
        )
    two = model.tables[1]
    flags = np.where(placed.extended[1], U8(2), placed.extended[0][two.rows[:, 1]].astype(U8))
    flags |= np.where(two.blank, U8(BLANK), U8(0))
    if placed.contexts:
        flags[placed.contexts[0].rank] |= U8(STORED)
    return LowPlain(
        one.log10_prob,
        one.log10_backoff,
        placed.extended[0],
        placed.begin[1],
        keys_of(two.rows[:, 1], key_bits_of(len(one))),
        two.log10_prob,
        two.log10_backoff,
        flags,
    )


def plain_tree(placed: PlacedModel, owns: NDArray[np.bool_]) -> tuple[list[LevelPlain], int, int]:
    """The levels of one shard, the n-grams in it and its blanks.

    Args
        owns  (4096,) bool: the slots of this shard
    """
    model = placed.model
    key_bits = key_bits_of(len(model.vocabulary))
    out = []
    ngram_total = blank_total = 0
    mine = [np.flatnonzero(owns[level.slot]).astype(I64) for level in placed.contexts]
    for i, level in enumerate(placed.contexts):
        nodes = mine[i]
        local = np.full(len(level.rank), -1, I64)
        local[nodes] = np.arange(len(nodes))
        table = model.tables[i + 1]
        rank = level.rank[nodes]
        # A root is named by its place in the bigram table, a deeper node by its oldest word.
        key = rank.astype(np.uint32) if i == 0 else keys_of(table.rows[rank, 0], key_bits)
        if i + 1 < len(placed.contexts):
            child_parent = local[placed.contexts[i + 1].parent[mine[i + 1]]]
            child = begins_of(child_parent, len(nodes))
        else:
            child = np.zeros(len(nodes) + 1, I64)
        # The list of the context without its oldest word: the n-grams with that prefix.
        shorter = placed.suffix[i + 1][rank]
        sizes = np.diff(placed.begin[i + 1])[shorter]

        longer = model.tables[i + 2]
        node = level.node[longer.prefix]
        gram = np.flatnonzero(owns[level.slot[node]])
        home = local[node[gram]]
        suffix = placed.suffix[i + 2][gram]
        in_list = suffix - placed.begin[i + 1][table.prefix[suffix]]
        place = np.argsort(pack_keys(home, in_list.astype(np.uint32)), kind="stable")
        gram, in_list = gram[place], in_list[place]
        blank = longer.blank[gram]
        out.append(
            LevelPlain(
                key,
                table.log10_backoff[rank],
                child,
                begins_of(home, len(nodes)),
                sizes,
                in_list.astype(np.uint32),
                longer.log10_prob[gram],
                placed.extended[i + 2][gram],
                blank,
            )
        )
        blank_total += int(blank.sum())
        ngram_total += len(gram) - int(blank.sum())
    return out, ngram_total, blank_total


def slot_bytes(placed: PlacedModel) -> NDArray[np.int64]:
    """Bytes stored under each slot, about."""
    load = np.zeros(4096, I64)
    for i, level in enumerate(placed.contexts):
        load += NODE_BYTES * np.bincount(level.slot, minlength=4096)
        node = level.node[placed.model.tables[i + 2].prefix]
        load += GRAM_BYTES * np.bincount(level.slot[node], minlength=4096)
    return load


def _write(
    folder: Path,
    model: NgramTables,
    shards: int,
    coding: Coding,
    slot_load: NDArray[np.int64] | None,
) -> dict[str, Any]:
    placed = place_model(model)
    load = slot_bytes(placed)
    table = balanced_slot_table(load if slot_load is None else slot_load, shards)

    files = []

    def add(
        kind: str, index: int | None, arrays: Arrays, ngrams: int, blanks: int, nodes: int
    ) -> None:
        name = layout.file_name(kind, index)
        size, digest = write_columns(folder / name, kind, arrays)
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
    return {"words": np.frombuffer(b"".join(w + b"\n" for w in model.vocabulary.words), U8)}


def write_columns(path: Path, kind: str, arrays: Mapping[str, NDArray[Any]]) -> tuple[int, str]:
    """Writes one file of a shard set and syncs it; returns its size in bytes and its XXH3-128."""
    columns = COLUMNS[kind]
    if list(arrays) != list(columns):
        raise ValueError(f"{kind} needs columns {list(columns)}, got {list(arrays)}")
    fields, lists = [], []
    for name, array in arrays.items():
        if array.dtype not in columns[name]:
            raise ValueError(f"column {name} of {kind} cannot be {array.dtype}")
        values = pa.array(np.ascontiguousarray(array), from_pandas=False)
        offsets = pa.array(np.array([0, len(array)], np.int64))
        lists.append(pa.LargeListArray.from_arrays(offsets, values))
        fields.append(pa.field(name, pa.large_list(values.type), nullable=False))
    schema = pa.schema(
        [f.with_type(a.type) for f, a in zip(fields, lists, strict=True)],
        metadata={"dlm.format_version": str(FORMAT_VERSION), "dlm.kind": kind},
    )
    with path.open("wb") as out:
        with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(lists, schema=schema))
        out.flush()
        os.fsync(out.fileno())
    return path.stat().st_size, file_checksum(path)


def pack_offsets(offsets: NDArray[Any]) -> Offsets:
    """The fewest bits for `offsets`; the narrower distances where two widths tie."""
    blocks = -(-len(offsets) // OFFSET_BLOCK)
    whole = np.full(blocks * OFFSET_BLOCK, offsets[-1], np.uint64)
    whole[: len(offsets)] = offsets
    rows = whole.reshape(blocks, OFFSET_BLOCK)
    base_bits = max(bits_of(int(offsets[-1])), bits_of(blocks))
    spans = rows[:, -1] - rows[:, 0]
    # How many spans need each width.
    widths = np.bincount(
        np.searchsorted(np.uint64(1) << np.arange(0, 64, dtype=np.uint64), spans, side="right"),
        minlength=base_bits + 1,
    )[: base_bits + 1]
    above = np.cumsum(widths[::-1])[::-1]  # above[i]: spans that need i bits or more
    costs = [
        blocks * (OFFSET_BLOCK - 1) * width
        + (int(above[width + 1]) if width < base_bits else 0) * OFFSET_BLOCK * base_bits
        for width in range(base_bits + 1)
    ]
    delta_bits = int(np.argmin(costs))
    wide = spans >= np.uint64(1) << np.uint64(delta_bits)
    stride = base_bits + 1 + (OFFSET_BLOCK - 1) * delta_bits
    words = room(blocks * stride)
    head = rows[:, 0] << np.uint64(1)
    head[wide] = (np.arange(int(wide.sum()), dtype=np.uint64) << np.uint64(1)) | np.uint64(1)
    kernels.put_all(words, 0, stride, base_bits + 1, head)
    for j in range(1, OFFSET_BLOCK if delta_bits else 1):
        delta = np.where(wide, np.uint64(0), rows[:, j] - rows[:, 0])
        kernels.put_all(words, base_bits + 1 + (j - 1) * delta_bits, stride, delta_bits, delta)
    return Offsets(words, pack_fields(rows[wide].reshape(-1), base_bits), base_bits, delta_bits)


@dataclass(frozen=True)
class Coded:
    """float32 values as codes, by a table or above a base."""

    codes: NDArray[np.uint64]
    bits: int
    base: int
    table: NDArray[np.float32]


def coded(
    bits: NDArray[np.uint32], largest_table: int, *, is_prob: bool, none: NDArray[np.bool_]
) -> Coded:
    """Codes of values by their bits, those of probabilities without a sign; of `none`, whose
    values are 0, the code 0, and otherwise one that breaks a rule."""
    there = bits[~none]
    distinct = np.unique(there)
    base, raw = 0, 32
    if is_prob:
        base = int(distinct[0]) if len(distinct) else 0
        raw = bits_of(int(distinct[-1]) - base) if len(distinct) else 0
    width = bits_of(max(len(distinct) - 1, 0))
    by_table = len(there) * width + len(distinct) * 32 < len(there) * raw
    if by_table and len(distinct) <= largest_table:
        codes = np.searchsorted(distinct, bits).astype(np.uint64)
        signs = np.uint32(1 << 31) * (distinct != 0) if is_prob else np.uint32(0)
        found = Coded(codes, width, 1 << 31, (distinct | signs).astype(np.uint32).view(np.float32))
    else:
        found = Coded(bits - np.uint64(base), raw, base, np.zeros(0, np.float32))
    found.codes[none] = bits[none] != 0
    return found


def coded_probs(
    values: NDArray[np.float32], largest_table: int, blank: NDArray[np.bool_] | None = None
) -> Coded:
    """Of log10 probabilities, of which some may be blanks'."""
    none = np.zeros(len(values), np.bool_) if blank is None else blank
    bits = np.abs(values).astype(np.float32).view(np.uint32)
    return coded(bits, largest_table, is_prob=True, none=none)


def coded_weights(values: NDArray[np.float32], largest_table: int) -> Coded:
    """Of weights."""
    none = np.zeros(len(values), np.bool_)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return coded(bits, largest_table, is_prob=False, none=none)


def pack_low(low: LowPlain, prob_table: int, backoff_table: int) -> Arrays:
    """The columns of `low_orders`.

    Args
        prob_table, backoff_table  entries that tables of values may have
    """
    size = len(low.log10_prob)
    b = key_bits_of(size)
    word_prob = coded_probs(low.log10_prob, prob_table)
    word_backoff = coded_weights(low.log10_backoff, backoff_table)
    prob = coded_probs(low.pair_log10_prob, prob_table, low.pair_flags & BLANK != 0)
    backoff = coded_weights(low.pair_log10_backoff, backoff_table)
    value_bits = PAIR_FLAG_BITS + prob.bits + backoff.bits
    place = np.empty(size + 1, np.int64)
    kernels.key_list_bits(low.begin, b, value_bits, place)
    lists = room(int(place[-1]))
    near = (prob.codes << np.uint64(PAIR_FLAG_BITS)) | low.pair_flags.astype(np.uint64)
    kernels.put_key_lists(
        lists,
        place,
        low.begin,
        b,
        value_bits,
        PAIR_FLAG_BITS + prob.bits,
        low.key,
        near,
        backoff.codes,
    )
    begin_bits, place_bits = bits_of(len(low.key)), bits_of(int(place[-1]))
    stride = begin_bits + place_bits + word_backoff.bits
    entries = room((size + 1) * stride)
    kernels.put_all(entries, 0, stride, begin_bits, low.begin.astype(np.uint64))
    kernels.put_all(entries, begin_bits, stride, place_bits, place.astype(np.uint64))
    kernels.put_all(entries, begin_bits + place_bits, stride, word_backoff.bits, word_backoff.codes)
    near1 = (word_prob.codes << np.uint64(1)) | low.extended.astype(np.uint64)
    shape = (
        size,
        len(low.key),
        b,
        word_prob.bits,
        word_backoff.bits,
        prob.bits,
        backoff.bits,
        begin_bits,
        place_bits,
        word_prob.base,
        prob.base,
    )
    return {
        "shape": np.array(shape, np.uint64),
        "word_value": pack_fields(near1, word_prob.bits + 1),
        "word_entry": entries,
        "list": lists,
        "word_prob_table": word_prob.table,
        "word_backoff_table": word_backoff.table,
        "pair_prob_table": prob.table,
        "pair_backoff_table": backoff.table,
    }


def pack_tree(
    levels: list[LevelPlain], pairs: int, key_bits: int, prob_table: int, backoff_table: int
) -> Arrays:
    """The columns of a shard whose levels are these, roots first."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in LEVEL_COLUMNS}
    at = dict.fromkeys(LEVEL_COLUMNS, 0)
    shapes: list[int] = []

    def add(name: str, part: NDArray[Any]) -> int:
        begin = at[name]
        parts[name].append(part)
        at[name] += len(part)
        return begin

    for depth, level in enumerate(levels):
        deepest = depth + 1 == len(levels)
        prob = coded_probs(level.log10_prob, prob_table, level.blank)
        flag_bits = int(not deepest) + int(level.blank.any())
        flags = np.zeros(len(level.rank), np.uint64)
        if not deepest:
            flags = level.extended.astype(np.uint64)
            if flag_bits == 2:
                flags |= level.blank.astype(np.uint64) << np.uint64(1)
        value_bits = prob.bits + flag_bits
        none = np.zeros(len(level.rank), np.uint64)
        place = np.empty(len(level.key) + 1, np.int64)
        kernels.rank_list_bits(level.begin, level.parent_size, value_bits, place)
        lists = room(int(place[-1]))
        values = (prob.codes << np.uint64(flag_bits)) | flags
        kernels.put_rank_lists(
            lists, place, level.begin, level.parent_size, value_bits, value_bits, level.rank,
            values, none,
        )  # fmt: skip
        places = pack_offsets(place)
        children = pack_offsets(level.child)
        weights = level.log10_backoff if depth else np.zeros(0, np.float32)
        backoff = coded_weights(weights, backoff_table)
        begins = (
            add("node_key", pack_fields(level.key, key_bits) if depth else room(0)),
            add("node_backoff", pack_fields(backoff.codes, backoff.bits)),
            add("child", children.words if not deepest else room(0)),
            add("child_wide", children.exceptions if not deepest else room(0)),
            add("place", places.words),
            add("place_wide", places.exceptions),
            add("list", lists),
            add("prob_table", prob.table),
            add("backoff_table", backoff.table),
        )
        shapes += [
            len(level.key),
            len(level.rank),
            flag_bits,
            prob.bits,
            prob.base,
            backoff.bits,
            children.base_bits if not deepest else 0,
            children.delta_bits if not deepest else 0,
            places.base_bits,
            places.delta_bits,
            *begins,
        ]
    roots = levels[0].key if levels else np.zeros(0, np.uint32)
    root_key_bits = root_key_bits_of(pairs, len(roots))
    bucket_bits = bits_of(len(roots))
    buckets = (pairs >> root_key_bits) + 1
    ends = np.searchsorted(
        roots, np.arange(buckets + 1, dtype=np.uint64) << np.uint64(root_key_bits)
    )
    low_part = roots & np.uint32((1 << root_key_bits) - 1)
    shape = (len(levels), pairs, len(roots), key_bits, root_key_bits, bucket_bits)
    columns: Arrays = {
        "shape": np.array([*shape, *shapes], np.uint64),
        "root_bucket": pack_fields(ends, bucket_bits),
        "root_key": pack_fields(low_part, root_key_bits),
    }
    for name in LEVEL_COLUMNS:
        dtype = np.float32 if name in TABLES else np.uint64
        columns[name] = np.concatenate([*parts[name], np.zeros(0, dtype)]).astype(dtype)
    return columns
