"""From the n-grams of a model to the tree of a shard, in plain arrays.

This is the plain form of the builder: whole arrays in memory. What streams must give the same.

Paper: DLM Algorithms 2 and 3, with blanks and with the two bits that the paper does not have:
what is extended and what is stored (shards/FORMAT.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlm.index.ngrams import NgramTables, pack_keys
from dlm.index.packed.low import BLANK, STORED, LowPlain, key_bits_of, keys_of
from dlm.index.packed.tree import LevelPlain
from dlm.ngram.partition import slots_of
from dlm.ngram.vocab import UNK_ID

I64 = np.int64
U8 = np.uint8


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


def begins_of(parent: NDArray[np.int64], parents: int) -> NDArray[np.int64]:
    """Where the children of each parent begin, children sorted by parent, and the end."""
    begins = np.zeros(parents + 1, I64)
    np.cumsum(np.bincount(parent, minlength=parents), out=begins[1:])
    return begins


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


# Bytes a node and an n-gram take in a shard, about; the balance goes by these.
NODE_BYTES = 6
GRAM_BYTES = 6


def slot_bytes(placed: PlacedModel) -> NDArray[np.int64]:
    """Bytes stored under each slot, about."""
    load = np.zeros(4096, I64)
    for i, level in enumerate(placed.contexts):
        load += NODE_BYTES * np.bincount(level.slot, minlength=4096)
        node = level.node[placed.model.tables[i + 2].prefix]
        load += GRAM_BYTES * np.bincount(level.slot[node], minlength=4096)
    return load
