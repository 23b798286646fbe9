"""Turns shards, written by `making`, back into n-grams, as sorted arrays or as an ARPA file.

The inverse of `making`: an n-gram of three words or more comes from the shard of the last two words
of its context; its back-off weight comes from its own node, which may be in another shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ShardFormatError
from dlm.index import layout
from dlm.index.layout import Manifest
from dlm.index.ngrams import NgramTables, OrderTable, Raw, begins_of
from dlm.index.packed.low import BLANK, STATE_LENGTH, LowPlain, key_bits_of, mirrored
from dlm.index.search.shard import Shard, ShardSet
from dlm.ngram.arpa import write_arpa
from dlm.ngram.vocab import UNK_ID, Vocabulary

I64 = np.int64
F32 = np.float32
U32 = np.uint32

# Reports a fault: the broken rule, the file, and the details.
FaultCallback = Callable[[str, str, str], None]


@dataclass(frozen=True, eq=False)
class Tables:
    """The contents of a shard set, by n-gram.

    extended  by order, (n,)  whether each row of `model.tables[order - 1]` is extended
    """

    model: NgramTables
    extended: list[NDArray[np.bool_]]


@dataclass(frozen=True, eq=False)
class DecodedModel:
    """The n-grams of a shard set, without blanks.

    orders  by order: rows (n, order) uint32, oldest word first, ascending; log10_prob (n,)
            float32; log10_backoff (n,) float32, 0 where the model has none
    """

    manifest: Manifest
    vocabulary: Vocabulary
    orders: Raw


def decode(directory: str | os.PathLike[str], *, verify: bool = True) -> DecodedModel:
    """The n-grams of the shard set in `directory`.

    Raises      ShardFormatError  the set is damaged, or its files contradict each other
    Guarantees  the values are those of the ARPA file that was sharded, bit for bit
    Cost        memory: about 90 bytes per n-gram at its peak
    """
    opened = ShardSet.open(directory, verify=verify)
    model = decode_tables(opened).model
    orders: Raw = []
    for table in model.tables:
        # The rows of an order are sorted by keys; people expect them sorted by ids.
        place = np.lexsort(table.rows.T[::-1])
        place = place[~table.blank[place]]
        orders.append((table.rows[place], table.log10_prob[place], table.log10_backoff[place]))
    return DecodedModel(opened.manifest, opened.vocabulary, orders)


def export_arpa(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str] | IO[bytes],
    *,
    verify: bool = True,
) -> DecodedModel:
    """Writes the model of a shard set as an ARPA file.

    Args        output  a path, compressed by its suffix (.gz, .zst, .xz), or an open binary file
    Raises      ShardFormatError, ArpaError, OSError
    Guarantees  the same words, ids and n-grams, bit-equal values and the comments of the file
                that was sharded; inside an order the n-grams are sorted by their ids
    """
    model = decode(directory, verify=verify)
    comments = model.manifest.provenance.get("comments")
    comments = comments if isinstance(comments, list) else []
    write_arpa(
        output, model.vocabulary, model.orders, comments=[c for c in comments if isinstance(c, str)]
    )
    return model


def decode_tables(opened: ShardSet, fault: FaultCallback | None = None) -> Tables:
    """Returns every n-gram and blank of a set, and whether each is extended.

    Args  fault  called if the files contradict each other; n-grams that cannot be placed are left
                 out. Without it, the first fault raises ShardFormatError
    """
    tell = _raise if fault is None else fault
    low = opened.low.plain()
    model = NgramTables(opened.vocabulary, [_words(opened, low)])
    extended = [low.extended]
    if opened.manifest.order > 1:
        model.tables.append(_pairs(opened, low))
        extended.append((low.pair_flags & STATE_LENGTH) == 2)
    trees = [_Tree(shard) for shard in opened.shards]
    for k in range(3, opened.manifest.order + 1):
        found = [tree.level(k - 3, model, tell) for tree in trees]
        for level in found:
            placed = level.node_rank >= 0
            model.tables[k - 2].log10_backoff[level.node_rank[placed]] = level.backoff[placed]
        table, flags = _joined(found, model, tell)
        model.tables.append(table)
        extended.append(flags)
    return Tables(model, extended)


def _raise(rule: str, file: str, message: str) -> None:
    raise ShardFormatError(f"{file} violates the format ({rule}): {message}")


def _words(opened: ShardSet, low: LowPlain) -> OrderTable:
    size = len(low.log10_prob)
    blank = np.zeros(size, np.bool_)
    blank[UNK_ID] = not opened.manifest.unk_in_model
    return OrderTable(
        np.arange(size, dtype=U32)[:, None],
        low.log10_prob,
        low.log10_backoff,
        blank,
        np.zeros(size, I64),
    )


def _pairs(opened: ShardSet, low: LowPlain) -> OrderTable:
    size = len(low.log10_prob)
    first = np.repeat(np.arange(size, dtype=U32), np.diff(low.begin))
    return OrderTable(
        np.column_stack([first, mirrored(low.key, key_bits_of(size))]),
        low.pair_log10_prob,
        np.zeros(len(low.key), F32),
        (low.pair_flags & BLANK) != 0,
        first.astype(I64),
    )


@dataclass(frozen=True, eq=False)
class _Level:
    """One level of one shard; `node_rank` is -1 for a context that the model lacks."""

    file: str
    node_rank: NDArray[np.int64]
    backoff: NDArray[np.float32]
    prefix: NDArray[np.int64]
    word: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    extended: NDArray[np.bool_]
    blank: NDArray[np.bool_]


class _Tree:
    """The tree of one shard, read level by level; `rows` has the contexts of the current level."""

    def __init__(self, shard: Shard) -> None:
        self.levels = shard.plain()
        self.file = layout.file_name("shard", shard.index)
        self.rows = np.zeros((0, 0), U32)
        # The words of the level above, and where each node's words begin.
        self.words = np.zeros(0, U32)
        self.begin = np.zeros(1, I64)

    def level(self, depth: int, model: NgramTables, tell: FaultCallback) -> _Level:
        """Level `depth`, whose contexts have depth + 2 words; call it for 0, 1, 2, ... in order."""
        a = self.levels[depth]
        key_bits = key_bits_of(len(model.vocabulary))
        ids, sizes = mirrored(a.key, key_bits), np.diff(a.begin)
        if depth == 0:
            node_rank = a.key.astype(I64)
            two = model.tables[1]
            self.rows = two.rows[node_rank]
            # Ranks point into the list of the context's last word: the pairs that begin with it.
            self.words = two.rows[:, 1]
            begin = begins_of(two.prefix, len(model.vocabulary))
            listed = np.diff(begin)[self.rows[:, 1]]
            parent_begin = begin[self.rows[:, 1]]
            beyond = np.flatnonzero(a.rank >= np.repeat(listed, sizes))
            if len(beyond):
                node = int(np.searchsorted(a.begin, beyond[0], side="right")) - 1
                tell(
                    "rank",
                    self.file,
                    f"a word after {spell(model.vocabulary, self.rows[node])} has a rank beyond "
                    f"the {listed[node]} words after that context's last word ({len(beyond)} such)",
                )
                # These ranks become 0, so that decoding can go on.
                a.rank[beyond] = 0
                parent_begin = np.where(listed, parent_begin, 0)
        else:
            above = self.levels[depth - 1]
            parent = np.repeat(np.arange(len(self.rows)), np.diff(above.child))
            self.rows = np.column_stack([ids, self.rows[parent]])
            parent_begin = self.begin[parent]
            node_rank = model.ranks(self.rows)
        word = self.words[np.repeat(parent_begin, sizes) + a.rank]
        lost = np.flatnonzero(node_rank < 0)
        if len(lost):
            tell(
                "node",
                self.file,
                f"the context {spell(model.vocabulary, self.rows[lost[0]])} is a node but "
                f"neither a {depth + 2}-gram nor a blank ({len(lost)} such)",
            )
        self.words, self.begin = word, a.begin[:-1]
        prefix = np.repeat(node_rank, sizes)
        return _Level(
            self.file, node_rank, a.log10_backoff, prefix, word, a.log10_prob, a.extended, a.blank
        )


def _joined(
    levels: list[_Level], model: NgramTables, tell: FaultCallback
) -> tuple[OrderTable, NDArray[np.bool_]]:
    contexts = model.tables[-1].rows
    prefix, word, prob, extended, blank = (
        np.concatenate([getattr(level, name) for level in levels])
        for name in ("prefix", "word", "log10_prob", "extended", "blank")
    )
    keys = model.sort_keys(np.maximum(prefix, 0), word)
    place = np.argsort(keys, kind="stable")
    place = place[prefix[place] >= 0]
    again = np.flatnonzero(keys[place][1:] == keys[place][:-1]) + 1
    if len(again):
        ends = np.cumsum([len(level.word) for level in levels])
        file = levels[int(np.searchsorted(ends, place[again[0]], side="right"))].file
        tell(
            "twice",
            file,
            f"a {contexts.shape[1] + 1}-gram or blank is stored twice ({len(again)} such)",
        )
        place = np.delete(place, again)
    prefix, word = prefix[place], word[place]
    return (
        OrderTable(
            np.column_stack([contexts[prefix], word]),
            prob[place],
            np.zeros(len(place), F32),
            blank[place],
            prefix,
        ),
        extended[place],
    )


def spell(vocabulary: Vocabulary, ids: NDArray[np.uint32]) -> str:
    """The words of `ids` for a message, shortened to one line."""
    text = repr(b" ".join(vocabulary.words[i] for i in ids.tolist()).decode("utf-8", "replace"))
    return text if len(text) <= 80 else text[:77] + "..."
