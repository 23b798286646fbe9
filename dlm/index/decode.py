"""From shards back to n-grams: what `build` wrote, as sorted arrays or as an ARPA file.

The inverse of `build`: an n-gram of three words or more comes from the shard of the last two words
of its context, its back-off weight from the node of the n-gram itself, which may lie in another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ShardFormatError
from dlm.index import layout
from dlm.index.layout import Manifest, read_manifest
from dlm.index.ngrams import NgramTables, OrderTable, Raw, pack_keys
from dlm.index.shard import LowOrders, Shard, open_vocabulary
from dlm.ngram.arpa import write_arpa
from dlm.ngram.vocab import Vocabulary

I64 = np.int64
F32 = np.float32
U32 = np.uint32

# What is told of a fault: the rule it breaks, the file, and how.
Fault = Callable[[str, str, str], None]


@dataclass(frozen=True, eq=False)
class ShardSet:
    """All files of a shard set, mapped and checked."""

    directory: Path
    manifest: Manifest
    vocabulary: Vocabulary
    low: LowOrders
    shards: list[Shard]

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, verify: bool = True) -> ShardSet:
        """Maps every file; see `shard.Shard.open` for `verify` and what is raised."""
        path = Path(directory)
        manifest = read_manifest(path)
        vocabulary = open_vocabulary(path, manifest, verify=verify)
        low = LowOrders.open(path, manifest, verify=verify)
        shards = [
            Shard.open(path, index, verify=verify, manifest=manifest, low=low)
            for index in range(manifest.shards)
        ]
        return cls(path, manifest, vocabulary, low, shards)


@dataclass(frozen=True, eq=False)
class Tables:
    """Everything that a shard set holds, by n-gram.

    Shapes
        meta   by order: (n,) uint8    the meta byte of each row of `model.tables[order - 1]`
        nodes  by context length from 2: (m,) int64  ranks of the contexts that are nodes, ascending
    """

    model: NgramTables
    meta: list[NDArray[np.uint8]]
    nodes: list[NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class DecodedModel:
    """The n-grams of a shard set, blanks left out.

    Shapes
        orders  by order: rows (n, order) uint32, oldest word first, ascending; log10_prob (n,)
                float32; log10_backoff (n,) float32, 0 where the model has none
    """

    manifest: Manifest
    vocabulary: Vocabulary
    orders: Raw


def decode(directory: str | os.PathLike[str], *, verify: bool = True) -> DecodedModel:
    """The n-grams of the shard set in `directory`.

    Raises
        ShardFormatError  the set is damaged, or its files do not fit each other
    Guarantees
        the values are those of the ARPA file that was sharded, bit for bit
    Cost
        memory: some 90 bytes an n-gram at its peak
    """
    opened = ShardSet.open(directory, verify=verify)
    model = decode_tables(opened).model
    orders: Raw = []
    for table in model.tables:
        keep = ~table.blank
        orders.append((table.rows[keep], table.log10_prob[keep], table.log10_backoff[keep]))
    return DecodedModel(opened.manifest, opened.vocabulary, orders)


def export_arpa(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str] | IO[bytes],
    *,
    verify: bool = True,
) -> DecodedModel:
    """Writes the model of a shard set as an ARPA file.

    Args
        output  a path, compressed by its suffix (.gz, .zst, .xz), or an open binary file

    Raises
        ShardFormatError, ArpaError, OSError
    Guarantees
        the same words, ids and n-grams, bit-equal values and the comments of the file that was
        sharded; inside an order the n-grams are sorted by their ids
    """
    model = decode(directory, verify=verify)
    comments = model.manifest.provenance.get("comments")
    comments = comments if isinstance(comments, list) else []
    write_arpa(
        output, model.vocabulary, model.orders, comments=[c for c in comments if isinstance(c, str)]
    )
    return model


def decode_tables(opened: ShardSet, fault: Fault | None = None) -> Tables:
    """Every n-gram and blank, with its meta byte, and the contexts that are nodes.

    Args
        fault  called where the files do not fit each other; what cannot be placed is then left out.
               Without it the first fault raises
    Raises
        ShardFormatError  without `fault`
    """
    tell = _raise if fault is None else fault
    one, two = _low_tables(opened)
    model = NgramTables(opened.vocabulary, [one[0]])
    meta, nodes = [one[1]], []
    if opened.manifest.order > 1:
        model.tables.append(two[0])
        meta.append(two[1])
    trees = [_Tree(shard) for shard in opened.shards]
    for k in range(3, opened.manifest.order + 1):
        found = [tree.level(k - 3, model, tell) for tree in trees]
        nodes.append(np.sort(np.concatenate([f.node_rank[f.node_rank >= 0] for f in found])))
        if k > 3:  # weights of contexts of two words stand in the bigram table
            for level in found:
                placed = level.node_rank >= 0
                model.tables[k - 2].log10_backoff[level.node_rank[placed]] = level.backoff[placed]
        table, bits = _joined(found, model.tables[k - 2].rows, tell)
        model.tables.append(table)
        meta.append(bits)
    return Tables(model, meta, nodes)


def _raise(rule: str, file: str, message: str) -> None:
    raise ShardFormatError(f"{file} breaks the format ({rule}): {message}")


def _low_tables(
    opened: ShardSet,
) -> tuple[tuple[OrderTable, NDArray[np.uint8]], tuple[OrderTable, NDArray[np.uint8]]]:
    """Orders 1 and 2, which stand together."""
    uni_prob, uni_backoff, uni_meta, begin, word, prob, backoff, meta = opened.low.columns
    size = len(uni_prob)
    ids = np.arange(size, dtype=U32)
    one = OrderTable(
        ids[:, None],
        uni_prob,
        uni_backoff,
        (uni_meta & layout.BLANK) != 0,
        np.zeros(size, I64),
    )
    first = np.repeat(ids, _sizes(begin))
    two = OrderTable(
        np.column_stack([first, word]),
        prob,
        backoff,
        (meta & layout.BLANK) != 0,
        first.astype(I64),
    )
    return (one, uni_meta), (two, meta)


def _sizes(begins: NDArray[Any]) -> NDArray[np.int64]:
    """How many lie between each begin and the next."""
    at = begins.astype(I64)
    return at[1:] - at[:-1]


@dataclass(frozen=True, eq=False)
class _Level:
    """One level of one shard: its nodes, and the n-grams that follow them.

    `node_rank` is -1 for a context that the model has not; `file` is for messages.
    """

    file: str
    node_rank: NDArray[np.int64]
    backoff: NDArray[np.float32]
    prefix: NDArray[np.int64]
    word: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    meta: NDArray[np.uint8]


class _Tree:
    """The tree of one shard, read level by level; `rows` are the contexts of the level at hand."""

    def __init__(self, shard: Shard) -> None:
        self.arrays = shard.arrays
        self.file = layout.file_name("shard", shard.index)
        self.begin = shard.arrays["level_begin"].astype(I64)
        self.rows = np.zeros((0, 0), U32)

    def level(self, depth: int, model: NgramTables, tell: Fault) -> _Level:
        """Level `depth`, whose contexts have depth + 2 words; to be called for 0, 1, 2, ..."""
        a = self.arrays
        first, end = int(self.begin[depth]), int(self.begin[depth + 1])
        key = a["node_key"][first:end]
        if depth == 0:
            node_rank = key.astype(I64)
            self.rows = model.tables[1].rows[node_rank]
        else:
            children = _sizes(a["node_child"][int(self.begin[depth - 1]) : first + 1])
            parent = np.repeat(np.arange(len(self.rows)), children)
            self.rows = np.column_stack([key, self.rows[parent]])
            node_rank = model.ranks(self.rows)
            lost = np.flatnonzero(node_rank < 0)
            if len(lost):
                tell(
                    "node",
                    self.file,
                    f"the context {spell(model.vocabulary, self.rows[lost[0]])} is a node but no "
                    f"{depth + 2}-gram or blank ({len(lost)} such)",
                )
        gram = a["node_gram"][first : end + 1].astype(I64)
        stretch = slice(int(gram[0]), int(gram[-1]))
        return _Level(
            self.file,
            node_rank,
            a["node_backoff"][first:end],
            np.repeat(node_rank, _sizes(gram)),
            a["gram_word"][stretch],
            a["gram_log10_prob"][stretch],
            a["gram_meta"][stretch],
        )


def _joined(
    levels: list[_Level], contexts: NDArray[np.uint32], tell: Fault
) -> tuple[OrderTable, NDArray[np.uint8]]:
    """One level of all shards as a table; n-grams of lost contexts and repeated ones left out."""
    prefix = np.concatenate([level.prefix for level in levels])
    word = np.concatenate([level.word for level in levels])
    prob = np.concatenate([level.log10_prob for level in levels])
    meta = np.concatenate([level.meta for level in levels])
    place = np.argsort(pack_keys(prefix, word), kind="stable")
    place = place[prefix[place] >= 0]
    keys = pack_keys(prefix[place], word[place])
    again = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    if len(again):
        ends = np.cumsum([len(level.word) for level in levels])
        file = levels[int(np.searchsorted(ends, place[again[0]], side="right"))].file
        tell(
            "twice",
            file,
            f"n-gram or blank of {contexts.shape[1] + 1} words stands twice ({len(again)} such)",
        )
        place = np.delete(place, again)
    prefix, word = prefix[place], word[place]
    return (
        OrderTable(
            np.column_stack([contexts[prefix], word]),
            prob[place],
            np.zeros(len(place), F32),
            (meta[place] & layout.BLANK) != 0,
            prefix,
        ),
        meta[place],
    )


def spell(vocabulary: Vocabulary, ids: NDArray[np.uint32]) -> str:
    """The words of `ids`, for a message: on one line, and not longer than a line."""
    text = repr(b" ".join(vocabulary.words[i] for i in ids.tolist()).decode("utf-8", "replace"))
    return text if len(text) <= 80 else text[:77] + "..."
