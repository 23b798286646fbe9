"""Maps one shard so that it can answer queries; and the low orders, which clients hold.

Opening checks the checksum of each file and then every offset, key and value in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dlm.errors import QueryError, ShardFormatError
from dlm.index.layout import MAX_ORDER, Arrays, Manifest, map_columns, read_manifest
from dlm.index.packed import check_kernels as checks, kernels as packed
from dlm.index.packed.check import check_low, check_tree
from dlm.index.packed.low import LowPlain, unpack_low
from dlm.index.packed.tree import LevelPlain, code_bytes, unpack_tree
from dlm.index.search import block_kernels, kernels, owned_kernels
from dlm.index.search.view import WORDS, low_view, tree_view
from dlm.memory_options import MAPPED, MemoryOptions
from dlm.ngram.partition import SLOTS
from dlm.ngram.query import Answers, QueryGroups, StoredWords
from dlm.ngram.vocab import Vocabulary
from dlm.ngram.wordtable import WordTable

# The kernels that open, check and search a shard; see jit.compile_ahead.
OPENING = (
    checks.check_backoffs,
    checks.check_key_lists,
    checks.check_records,
    checks.check_words_value,
    packed.get_all,
)
KERNELS = (
    *(kernels.score_lengths, owned_kernels.score_owned, owned_kernels.search_lengths),
    *(block_kernels.find_blocks, block_kernels.list_blocks),
    *OPENING,
)


_U8, _U32 = np.dtype(np.uint8), np.dtype(np.uint32)


@dataclass(frozen=True, eq=False)
class LowOrders:
    """1- and 2-grams, with the bit that says whether anything is stored under a pair.

    arrays  the packed columns, mapped; `view`, which the kernels take, holds their addresses
    """

    manifest: Manifest
    arrays: Arrays
    view: NDArray[np.int64]

    @classmethod
    def open(
        cls,
        directory: Path,
        manifest: Manifest,
        *,
        verify: bool = True,
        memory_options: MemoryOptions = MAPPED,
    ) -> LowOrders:
        """Maps the file; raises ShardFormatError if it is damaged. Without `verify`, the checksum
        is not compared."""
        entry = manifest.file("low_orders")
        path = directory / entry.name
        a = map_columns(path, entry, verify=verify, memory_options=memory_options)
        with _breaks(path):
            pairs = check_low(a, manifest.vocabulary_size, manifest.order)
            if pairs != manifest.pairs:
                raise ValueError(f"found {pairs} 2-grams; the manifest says {manifest.pairs}")
        return cls(manifest, a, low_view(a))

    def plain(self) -> LowPlain:
        """The low orders unpacked: 25 bytes per 2-gram, in the process's own memory."""
        return unpack_low(self.arrays)

    def stored_pairs(
        self, first: NDArray[np.uint32], second: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        """Calls `block_kernels.find_stored`; returns the number of each pair, or NO_RANK."""
        pairs = np.empty(len(first), np.uint32)
        block_kernels.find_stored(self.view, first, second, pairs)
        return pairs


@contextmanager
def _breaks(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise ShardFormatError(
            f"{path} violates the format: {exc}. Fetch it again, or build the shards again"
        ) from exc


def open_vocabulary(directory: Path, manifest: Manifest, *, verify: bool = True) -> Vocabulary:
    """The words of a shard set; raises `ShardFormatError` if the file is damaged."""
    entry = manifest.file("vocabulary")
    path = directory / entry.name
    a = map_columns(path, entry, verify=verify)
    text = a["words"]
    is_end = text == ord("\n")
    ends = np.flatnonzero(is_end)
    count = manifest.vocabulary_size
    with _breaks(path):
        if len(ends) != count or ends[-1] != len(text) - 1:
            raise ValueError(
                f"column words has {len(ends)} newlines; expected {count}, the last at its end"
            )
        table = WordTable.from_arrays(text[~is_end], np.append(0, ends - np.arange(count)))
        return table.vocabulary(unk_in_model=manifest.unk_in_model)


@dataclass(frozen=True, eq=False, slots=True)
class FoundBlocks:
    """Contexts of a shard, and where the words after each are stored.

    Shapes  context_lengths, context_words, pairs  as in `QueryGroups`
            nodes (C,)  the root of each context, -1 if there is no root
            totals (C,)  number of words that are stored after each context's last two words
            log10_backoffs (sum(context_lengths - 1),)  as in `StoredWords`
    """

    context_lengths: NDArray[np.uint8]
    context_words: NDArray[np.uint32]
    pairs: NDArray[np.uint32]
    nodes: NDArray[np.int64]
    totals: NDArray[np.uint32]
    log10_backoffs: NDArray[np.float32]

    @property
    def words(self) -> int:
        return int(self.totals.sum(dtype=np.int64))


class Shard:
    """One shard of a shard set; made by `Shard.open`. Its clients hold the low orders."""

    def __init__(self, directory: Path, manifest: Manifest, index: int, arrays: Arrays) -> None:
        self.directory = directory
        self.manifest = manifest
        self.index = index
        self.arrays = arrays
        self.order = manifest.order
        self.vocabulary_size = manifest.vocabulary_size
        self.view = tree_view(arrays, manifest.vocabulary_size)
        self.trees = np.array([self.view.ctypes.data], np.int64)  # this shard's tree alone
        self._slots = manifest.slots

    @classmethod
    def open(
        cls,
        directory: Path,
        index: int,
        *,
        verify: bool = True,
        manifest: Manifest | None = None,
        memory_options: MemoryOptions = MAPPED,
    ) -> Shard:
        """Maps shard `index` of the shard set in `directory`.

        Args    verify    check the checksum of the file; offsets, keys and values are checked
                          regardless
                manifest  of the set, if it was already read
        Raises  ConfigError       memory cannot be locked
                ShardFormatError  the file is missing, damaged or contradicts the manifest
        """
        directory = Path(directory)
        manifest = read_manifest(directory) if manifest is None else manifest
        entry = manifest.file("shard", index)
        path = directory / entry.name
        arrays = map_columns(path, entry, verify=verify, memory_options=memory_options)
        with _breaks(path):
            grams = check_tree(
                arrays, max(manifest.order - 2, 0), manifest.vocabulary_size, manifest.pairs,
                entry.nodes,
            )  # fmt: skip
            if grams != entry.ngrams + entry.blanks:
                raise ValueError(
                    f"found {grams} n-grams and blanks in all; the manifest says {entry.ngrams} "
                    f"n-grams and {entry.blanks} blanks"
                )
        return cls(directory, manifest, index, arrays)

    def plain(self) -> list[LevelPlain]:
        return unpack_tree(self.arrays)

    @cached_property
    def owned(self) -> NDArray[np.bool_]:
        """(4096,) bool: the slots of this shard."""
        owned: NDArray[np.bool_] = self.manifest.slots == self.index
        return owned

    def score(self, groups: QueryGroups) -> Answers:
        """The tree's answers to all queries, in order, from `kernels.search_trees`; one kernel
        call, without the GIL.

        Trusts  what the kernel trusts; and that this shard owns the contexts
        """
        answers = Answers.empty(len(groups.words))
        owned_kernels.search_lengths(
            self.trees, self._slots, groups.context_lengths, groups.context_words, groups.pairs,
            groups.word_counts, groups.words, answers.log10_prob, answers.matched_order,
            answers.ngram_length, answers.state_length,
        )  # fmt: skip
        return answers

    def score_owned(
        self,
        context_lengths: NDArray[np.uint8],
        context_words: NDArray[np.uint32],
        pairs: NDArray[np.uint32],
        word_counts: NDArray[np.uint32],
        ranks: NDArray[np.uint32],
        by_slot: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """Returns packed answers to untrusted queries, (7 Q,) uint8 as in a reply, and how many
        matched each order, (16,); None if a query breaks a rule of `owned_kernels.score_owned`, or
        belongs to another shard. Adds to `by_slot` (4096,) the queries of each slot.

        It takes the arrays of a `QueryGroups`, since making one takes as long as ten queries.
        """
        packed = np.empty(owned_kernels.PACKED_BYTES * len(ranks), np.uint8)
        by_order = np.zeros(MAX_ORDER + 1, np.int64)
        if by_slot is None:
            by_slot = np.zeros(SLOTS, np.int64)
        good = owned_kernels.score_owned(
            self.view,
            self.trees,
            self.order,
            self._slots,
            self.index,
            context_lengths,
            context_words,
            pairs,
            word_counts,
            ranks,
            packed,
            by_order,
            by_slot,
        )
        return (packed, by_order) if good else None

    def find_blocks(
        self,
        context_lengths: NDArray[np.uint8],
        context_words: NDArray[np.uint32],
        pairs: NDArray[np.uint32],
    ) -> FoundBlocks:
        """Finds where words after contexts of two words or more are; trusts what `score` trusts."""
        nodes = np.empty(len(context_lengths), np.int64)
        totals = np.empty(len(context_lengths), np.uint32)
        weights = len(context_words) - len(context_lengths)
        log10_backoffs = np.empty(weights, np.float32)
        block_kernels.find_blocks(
            self.view, context_lengths, context_words, pairs, nodes, totals, log10_backoffs
        )
        return FoundBlocks(context_lengths, context_words, pairs, nodes, totals, log10_backoffs)

    def stored_words(self, found: FoundBlocks, skips: NDArray[np.uint32], most: int) -> StoredWords:
        """The words stored after each context, without the first `skips`; at most `most` in all.

        Shapes  found  from contexts of two words or more each; skips (C,) uint32
        Trusts  what `score` trusts
        Cost    lists all words of a context, even to return a few; searches only those returned
        """
        counts = np.empty(len(found.nodes), np.uint32)
        ranks = np.empty(min(found.words, most), np.uint32)
        given = block_kernels.list_blocks(
            self.view, found.nodes, found.totals, skips, most, counts, ranks
        )
        ranks = ranks[:given]
        answers = self.score(
            QueryGroups(found.context_lengths, found.context_words, counts, ranks, found.pairs)
        )
        return StoredWords(found.totals, counts, found.log10_backoffs, ranks, answers)


def require_one_code(shards: Sequence[Shard]) -> None:
    """Raises ShardFormatError if a shard encodes values differently from the first: code that reads
    several trees uses the codes of one."""
    for shard in shards[1:]:
        if code_bytes(shard.arrays) != code_bytes(shards[0].arrays):
            raise ShardFormatError(
                f"{shard.directory} contradicts itself: shards 0 and {shard.index} encode values "
                "in different ways. Fetch the set again, or build the shards again"
            )


@dataclass(frozen=True, eq=False)
class ShardSet:
    directory: Path
    manifest: Manifest
    vocabulary: Vocabulary
    low: LowOrders
    shards: list[Shard]

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        verify: bool = True,
        memory_options: MemoryOptions = MAPPED,
    ) -> Self:
        """Maps every file of the shard set in `directory`.

        Args    verify  check the checksum of each file; offsets and keys are checked regardless
        Raises  ShardFormatError  a file is missing, damaged or contradicts the manifest
        """
        path = Path(directory)
        manifest = read_manifest(path)
        vocabulary = open_vocabulary(path, manifest, verify=verify)
        low = LowOrders.open(path, manifest, verify=verify, memory_options=memory_options)
        shards = [
            Shard.open(
                path,
                index,
                verify=verify,
                manifest=manifest,
                memory_options=memory_options,
            )
            for index in range(manifest.shards)
        ]
        require_one_code(shards)
        return cls(path, manifest, vocabulary, low, shards)


def check_types(groups: QueryGroups) -> None:
    for array, dtype in (
        (groups.context_lengths, _U8),
        (groups.context_words, _U32),
        (groups.word_counts, _U32),
        (groups.words, _U32),
    ):
        if (array.dtype is not dtype and array.dtype != dtype) or array.ndim != 1:
            raise QueryError(
                f"an array of {array.dtype} with {array.ndim} dimensions was sent; expected "
                f"{dtype} with one dimension"
            )


NO_TREES = np.zeros(0, np.int64)
_NO_SLOTS = np.zeros(0, np.uint16)


def run_kernel(
    view: NDArray[np.int64],
    order: int,
    groups: QueryGroups,
    trees: NDArray[np.int64] = NO_TREES,
    slots: NDArray[np.uint16] = _NO_SLOTS,
) -> tuple[Answers, NDArray[np.uint8]]:
    """Calls `kernels.score_lengths`; returns the answers, and whether each context needs a shard.

    Raises  QueryError  lengths do not match, a context is too long, or an id is out of range
    Trusts  the columns behind `view` are still mapped; the arrays have the types of `QueryGroups`
    """
    queries = len(groups.words)
    # Few allocations are made, since a call of a thousand queries takes only about 100
    # microseconds.
    floats = np.empty(queries, np.float32)
    bytes_ = np.empty((3, queries), np.uint8)
    answers = Answers(floats, bytes_[0], bytes_[1], bytes_[2])
    needs_shard = np.empty(len(groups.context_lengths), np.uint8)
    fault = kernels.score_lengths(
        view,
        trees,
        slots,
        order,
        groups.context_lengths,
        groups.context_words,
        groups.word_counts,
        groups.words,
        answers.log10_prob,
        answers.matched_order,
        answers.ngram_length,
        answers.state_length,
        needs_shard,
    )
    if fault:
        raise QueryError(_refusal(int(fault), order, int(view[WORDS]), groups))
    return answers, needs_shard


def _refusal(fault: int, order: int, size: int, groups: QueryGroups) -> str:
    if fault == kernels.LENGTHS:
        return (
            f"{len(groups.context_lengths)} context lengths, {len(groups.word_counts)} counts, "
            f"{len(groups.context_words)} context words and {len(groups.words)} words disagree; "
            "expected as many counts as lengths; counts must sum to words, lengths to context words"
        )
    if fault == kernels.CONTEXT_LENGTH:
        return (
            f"a context of {int(groups.context_lengths.max())} words was sent to a model of order "
            f"{order}, which takes at most {order - 1}; leave out the oldest words"
        )
    largest = max(int(a.max()) for a in (groups.context_words, groups.words) if len(a))
    return f"word id {largest} is out of range; ids are below {size}"
