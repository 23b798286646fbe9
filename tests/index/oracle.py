"""The builder with the whole model in memory: the oracle of the one that streams.

Plain arrays from beginning to end: the n-grams sorted and closed under suffixes, the tree of each
shard, its columns packed whole. It shares with `dlm.index` what reads (names of files, n-gram
tables, widths), and nothing that builds.

Paper: DLM Algorithms 2 and 3, with blanks and with the two bits that the paper does not have:
what is extended and what is stored (shards/FORMAT.md).
"""

from __future__ import annotations

import os
from collections import Counter
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
    Raw,
    begins_of,
    pack_keys,
    read_raw,
    sorted_tables,
    with_prefixes,
)
from dlm.index.packed import kernels
from dlm.index.packed.columns import bits_of, room
from dlm.index.packed.low import BLANK, STATE_LENGTH, STORED, LowPlain, key_bits_of, mirrored
from dlm.index.packed.tree import LevelPlain
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.partition import balanced_slot_table, slots_of
from dlm.ngram.vocab import UNK_ID, Vocabulary

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
    """The model in an ARPA file, sorted and closed under suffixes; and the reader, consumed."""
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
    vocabulary, raw = numbered(vocabulary, raw)
    tables = sorted_tables(vocabulary, raw, reader)
    close_under_suffixes(tables)
    return tables, reader


def numbered(vocabulary: Vocabulary, raw: Raw) -> tuple[Vocabulary, Raw]:
    """A model with its words in the order of the format: see "Words" in shards/FORMAT.md."""
    ids, prob, backoff = raw[0]
    values = {int(i): (b == 0, -p) for i, p, b in zip(ids[:, 0], prob, backoff, strict=True)}
    order = [0, *sorted(range(1, len(vocabulary)), key=values.__getitem__)]
    new = np.argsort(order).astype(U32)
    words = [vocabulary.words[i] for i in order]
    return (
        Vocabulary(words, unk_in_model=vocabulary.unk_in_model),
        [(new[rows], *values) for rows, *values in raw],
    )


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
    """`model` with at most 2**bits probabilities, 2**weight_bits(bits) weights an order, from 2."""
    tables = model.tables[:1]
    for table in model.tables[1:]:
        prob = table.log10_prob.copy()
        keep = ~table.blank
        prob[keep] = quantise(prob[keep], bits)
        weight = quantise(table.log10_backoff, weight_bits(bits), zero=True)
        tables.append(replace(table, log10_prob=prob, log10_backoff=weight))
    return NgramTables(model.vocabulary, tables)


def quantise(values: NDArray[np.float32], bits: int, *, zero: bool = False) -> NDArray[np.float32]:
    """Each value replaced by the nearest of a codebook of at most 2**bits, with 0 if `zero`."""
    out = values.copy()
    own = ~((values == 0) | ~np.isfinite(values))
    specials = len(np.unique(np.append(values[~own], np.zeros(int(zero), F32))))
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

    A context is a node if something follows it, if it has a back-off weight, or if a longer node
    hangs below it.
    """
    wanted: list[NDArray[np.bool_]] = []
    for k in range(2, model.order):
        table = model.tables[k - 1]
        keep = table.log10_backoff != 0
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
            place = np.argsort(pack_keys(parent, mirrored(rows[rank, 0], key_bits)), kind="stable")
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
        mirrored(two.rows[:, 1], key_bits_of(len(one))),
        two.log10_prob,
        flags,
    )


def plain_tree(placed: PlacedModel, owns: NDArray[np.bool_]) -> tuple[list[LevelPlain], int, int]:
    """The levels of one shard, which owns these slots (4096,); its n-grams, its blanks."""
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
        key = rank.astype(np.uint32) if i == 0 else mirrored(table.rows[rank, 0], key_bits)
        if i + 1 < len(placed.contexts):
            child_parent = local[placed.contexts[i + 1].parent[mine[i + 1]]]
            child = begins_of(child_parent, len(nodes))
        else:
            child = np.zeros(len(nodes) + 1, I64)
        # The list of the context without its oldest word: the n-grams with that prefix.
        shorter = placed.suffix[i + 1][rank]
        sizes = np.diff(placed.begin[i + 1])[shorter] if i else np.zeros(len(rank), I64)

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
    for index, (arrays, *numbers) in enumerate(shards_arrays(placed, table, shards, coding)):
        add("shard", index, arrays, *numbers)

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
    return pack_low(plain_low(placed), coding.prob_table)


def shards_arrays(
    placed: PlacedModel, slots: NDArray[np.uint16], shards: int, coding: Coding
) -> list[tuple[Arrays, int, int, int]]:
    """Of each shard its columns, n-grams, blanks and nodes; `slots` (4096,)."""
    model = placed.model
    plain = [plain_tree(placed, slots == shard) for shard in range(shards)]
    codes = tree_codes([levels for levels, _, _ in plain], coding.prob_table)
    pairs = len(model.tables[1]) if model.order > 1 else 0
    key_bits = key_bits_of(len(model.vocabulary))
    return [
        (
            pack_tree(levels, pairs, key_bits, codes),
            ngrams,
            blanks,
            sum(len(level.key) for level in levels),
        )
        for levels, ngrams, blanks in plain
    ]


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


def pack_low(low: LowPlain, prob_table: int) -> Arrays:
    """The columns of `low_orders`; tables of probabilities have at most `prob_table` entries."""
    size = len(low.log10_prob)
    b = key_bits_of(size)
    used = np.flatnonzero((np.diff(low.begin) > 0) | (low.log10_backoff != 0))
    count = int(used[-1]) + 1 if len(used) else 0
    weight = coded_weights(np.append(low.log10_backoff[:count], F32(0)), 1 << 31)
    blank = low.pair_flags & BLANK != 0
    prob = coded_probs(low.pair_log10_prob, prob_table, blank)
    state, stored = low.pair_flags & STATE_LENGTH, low.pair_flags & STORED != 0
    plain = low.extended[1:count].all() and not low.extended[max(count, 1) :].any()
    plain = plain and not (stored & (state < 2) | blank).any()
    flag_bits = 1 if plain else 3
    value_bits = flag_bits + prob.bits
    begin, widths = low.begin[: count + 1], np.ones(count, I64)
    key = low.key.copy()
    for word, (first, end) in enumerate(pairwise(begin)):
        if first < end:
            widths[word] = max(1, bits_of(mirrored(low.key[first:end], b).max()))
            key[first:end] >>= np.uint32(b - widths[word])
    place = np.empty(count + 1, np.int64)
    kernels.key_list_bits(begin, widths, value_bits, place)
    lists = room(int(place[-1]))
    state = stored if flag_bits == 1 else np.where(stored & (state < 2), 3, state)
    near = prob.codes << np.uint64(flag_bits) | state | blank.astype(np.uint64) << np.uint64(2)
    kernels.put_key_lists(lists, place, begin, widths, value_bits, key, near)
    begin_bits, place_bits = bits_of(len(low.key)), bits_of(int(place[-1]))
    entries, words = BitWriter(), BitWriter()
    for word in range(count + 2):
        entries.put(int(begin[min(word, count)]), begin_bits)
        entries.put(int(place[word]) if word <= count else 0, place_bits)
        entries.put(int(widths[word]) - 1 if word < count else 0, 5)
        entries.put(int(weight.codes[word]) if word <= count else 0, weight.bits)
    runs: list[np.float32] = []
    for first in range(0, size, 16):
        words.put(len(runs), 32)
        probs, flags = low.log10_prob[first : first + 16], low.extended[first : first + 16]
        for value in probs:
            words.put(int(not runs or value != runs[-1]), 1)
            runs += [value] if not runs or value != runs[-1] else []
        words.put(0, 16 - len(probs))
        for flag in flags:
            words.put(int(flag), 1)
        words.put(0, 16 - len(flags))
    shape = (size, len(low.key), count, weight.bits, flag_bits, prob.bits, begin_bits, place_bits)
    return {
        "shape": np.array([*shape, prob.base], np.uint64),
        "word_value": words.words()[:-1],
        "word_entry": entries.words(),
        "list": lists,
        "word_prob_table": np.array(runs, F32),
        "word_backoff_table": weight.table,
        "pair_prob_table": prob.table,
    }


@dataclass(frozen=True)
class TreeCode:
    """How a level of all trees stores its values; `weights` by how often they occur, and where
    among them stands that 32 bits follow."""

    flag_bits: int
    prob: Coded
    weights: list[int]
    escape: int


def tree_codes(trees: list[list[LevelPlain]], prob_table: int) -> list[TreeCode]:
    """The code of each level, from all trees of a model."""
    found = []
    depths = len(trees[0])
    for depth, levels in enumerate(zip(*trees, strict=True)):
        probs, blanks = (
            np.concatenate([getattr(level, name) for level in levels])
            for name in ("log10_prob", "blank")
        )
        flag_bits = 0 if depth + 1 == depths else 2 if blanks.any() else 1
        prob = coded_probs(probs, prob_table, blanks)
        weights = np.concatenate([level.log10_backoff for level in levels]).view(np.uint32)
        often = Counter(weights.tolist())
        table = sorted(
            (weight for weight, count in often.items() if count >= 16),
            key=lambda weight: (-often[weight], weight),
        )[:65535]
        rare = sum(often.values()) - sum(often[weight] for weight in table)
        escape = sum(often[weight] >= rare for weight in table)
        if rare:
            table.insert(escape, 0x7F800000)
        found.append(TreeCode(flag_bits, prob, table, escape))
    return found


class BitWriter:
    """Fields one after another, the lowest bit of each first."""

    def __init__(self) -> None:
        self.bits = bytearray()

    def put(self, value: int, width: int) -> None:
        """A field."""
        assert value >> width == 0, (value, width)
        self.bits.extend((value >> i) & 1 for i in range(width))

    def gamma(self, value: int) -> None:
        """The Elias gamma code of a number."""
        more = value.bit_length() - 1
        self.put(0, more)
        self.put(1, 1)
        self.put(value & ((1 << more) - 1), more)

    def words(self) -> NDArray[np.uint64]:
        """Packed, and a spare word."""
        out = room(len(self.bits))
        packed = np.packbits(np.frombuffer(self.bits, np.uint8), bitorder="little")
        out.view(np.uint8)[: len(packed)] = packed
        return out


def put_words(out: BitWriter, ranks: list[int], values: list[int], width: int, bits: int) -> None:
    """The list of the words that follow a context, with ranks of so many bits."""
    if width == 0:
        for value in values:
            out.put(value, bits)
        return
    n = len(ranks)
    leading = n.bit_length() - 3 if n > 8 else 0
    rest = width - leading
    buckets = [[i for i in range(n) if ranks[i] >> rest == b] for b in range(1 << leading)]
    if leading:
        for b in range((1 << leading) + 1):
            out.put(sum(map(len, buckets[:b])), n.bit_length())
    for bucket in buckets:
        for i in bucket:
            out.put(ranks[i] & ((1 << rest) - 1), rest)
        for i in bucket:
            out.put(values[i], bits)


class RecordWriter:
    """Records of a tree, each by its level and its number there."""

    def __init__(self, levels: list[LevelPlain], codes: list[TreeCode], key_bits: int) -> None:
        self.levels, self.codes, self.key_bits = levels, codes, key_bits
        self.values = []
        for level, code in zip(levels, codes, strict=True):
            prob = recoded(code.prob, level.log10_prob, level.blank)
            flags = level.extended.astype(np.uint64) if code.flag_bits else np.uint64(0)
            if code.flag_bits == 2:
                flags |= level.blank.astype(np.uint64) << np.uint64(1)
            self.values.append((prob << np.uint64(code.flag_bits)) | flags)

    def record(self, depth: int, node: int) -> bytearray:
        """Its bits, with all below."""
        level, code = self.levels[depth], self.codes[depth]
        grams = slice(level.begin[node], level.begin[node + 1])
        ranks, values = level.rank[grams].tolist(), self.values[depth][grams].tolist()
        size = int(level.parent_size[node])
        width = 0 if len(ranks) == size else bits_of(size - 1)
        out = BitWriter()
        if depth == 0:
            out.gamma(len(ranks) + 1)
        elif len(ranks) == size:
            out.put(1, 1)
        else:
            out.put(0, 1)
            out.gamma(len(ranks) or size)
        weight = int(level.log10_backoff[node].view(np.uint32))
        known = [i for i, x in enumerate(code.weights) if x == weight and i != code.escape]
        out.gamma((known[0] if known else code.escape) + 1)
        if not known:
            out.put(weight, 32)
        children = range(0)
        if depth + 1 < len(self.levels):
            children = range(level.child[node], level.child[node + 1])
            out.gamma(len(children) + 1)
        if depth == 0 and ranks:
            width = max(1, bits_of(max(ranks)))
            out.put(width - 1, 5)
        put_words(out, ranks, values, width, code.prob.bits + code.flag_bits)
        if children:
            keys = self.levels[depth + 1].key[children.start : children.stop]
            ids = mirrored(keys, self.key_bits).tolist()
            records = [self.record(depth + 1, child) for child in children]
            put_family(out, keys.tolist(), ids, self.key_bits, records)
        return out.bits


def put_family(
    out: BitWriter, keys: list[int], ids: list[int], key_bits: int, records: list[bytearray]
) -> None:
    """Contexts by their keys, or by their ids where they are few, with their records."""
    count = len(records)
    if count <= 8:
        far = [0, *np.cumsum([len(record) for record in records]).tolist()]
        width = max(1, max(ids, default=0).bit_length())
        step = bits_of(far[max(count - 1, 0)])
        if count:
            out.put(width - 1, 5)
        if count > 1:
            out.put(step, 6)
        for word in ids:
            out.put(word, width)
        for distance in far[1:-1]:
            out.put(distance, step)
        for record in records:
            out.bits.extend(record)
        return
    leading = count.bit_length() - 3
    rest = key_bits - leading
    buckets = []
    for b in range(1 << leading):
        mine = [i for i in range(count) if keys[i] >> rest == b]
        bucket = BitWriter()
        bucket.gamma(len(mine) + 1)
        far = [0, *np.cumsum([len(records[i]) for i in mine]).tolist()]
        step = bits_of(far[max(len(mine) - 1, 0)])
        if len(mine) > 1:
            bucket.put(step, 6)
        for i in mine:
            bucket.put(keys[i] & ((1 << rest) - 1), rest)
        for distance in far[1:-1]:
            bucket.put(distance, step)
        for i in mine:
            bucket.bits.extend(records[i])
        buckets.append(bucket.bits)
    begins = [0, *np.cumsum([len(bucket) for bucket in buckets]).tolist()]
    step = bits_of(begins[-1])
    out.put(step, 6)
    for begin in begins:
        out.put(begin, step)
    for bucket in buckets:
        out.bits.extend(bucket)


def recoded(
    code: Coded, values: NDArray[np.float32], none: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    """Codes of some of the values that the code was made of."""
    bits = np.abs(values).astype(np.float32).view(np.uint32)
    codes = bits - np.uint64(code.base)
    if len(code.table):
        table = np.abs(code.table).astype(np.float32).view(np.uint32)
        codes = np.searchsorted(table, bits).astype(np.uint64)
    codes[none] = bits[none] != 0
    return codes


def pack_tree(levels: list[LevelPlain], pairs: int, key_bits: int, codes: list[TreeCode]) -> Arrays:
    """The columns of a shard whose levels are these, roots first."""
    roots = (levels[0].key if levels else np.zeros(0, np.uint32)).tolist()
    writer, tree = RecordWriter(levels, codes, key_bits), BitWriter()
    records = [writer.record(0, root) for root in range(len(roots))]
    put_family(tree, roots, roots, max(1, bits_of(pairs - 1)), records)
    shape = [len(levels), pairs, key_bits, len(tree.bits)]
    tables: tuple[list[Any], list[Any]] = [], []
    for level, code in zip(levels, codes, strict=True):
        shape += [len(level.key), len(level.rank), code.flag_bits, code.prob.bits, code.prob.base]
        shape += [code.escape, len(code.prob.table), len(code.weights)]
        tables[0].append(code.prob.table)
        tables[1].append(np.array(code.weights, np.uint32).view(F32))
    whole = [np.concatenate([*parts, np.zeros(0, F32)]).astype(F32) for parts in tables]
    return {
        "shape": np.array(shape, np.uint64),
        "tree": tree.words(),
        "prob_table": whole[0],
        "weight_table": whole[1],
    }
