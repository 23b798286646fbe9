"""One shard, mapped and ready to answer; and the low orders that every machine holds.

Opening checks the checksum of each file and then every offset, key and value in it, so that neither
damage nor a hostile file can make a kernel read where it should not, or become a score.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import QueryError, ShardFormatError
from dlm.index import kernels, layout
from dlm.index.layout import Arrays, Manifest, map_columns, read_manifest
from dlm.ngram.query import Answers, QueryGroups
from dlm.ngram.vocab import Vocabulary

Columns = tuple[NDArray[Any], ...]


def empty_tree() -> Columns:
    """The columns of a shard that holds nothing."""
    return (
        np.zeros(1, np.uint64),
        np.zeros(0, np.uint32),
        np.zeros(0, np.float32),
        np.zeros(1, np.uint32),
        np.zeros(1, np.uint32),
        np.zeros(0, np.uint32),
        np.zeros(0, np.float32),
        np.zeros(0, np.uint8),
    )


def _require(holds: bool | np.bool_, path: Path, rule: str) -> None:
    if not holds:
        raise ShardFormatError(
            f"{path} breaks the format: {rule}. Fetch it again, or build the shards again"
        )


def _check_begins(begins: NDArray[Any], parents: int, total: int, path: Path, name: str) -> None:
    _require(len(begins) == parents + 1, path, f"{name} must have {parents + 1} values")
    _require(begins[0] == 0 or name == "node_child", path, f"{name} must begin with 0")
    _require(int(begins[-1]) == total, path, f"{name} must end with {total}")
    _require(bool((begins[1:] >= begins[:-1]).all()), path, f"{name} must never fall")


def _check_sorted_within(
    keys: NDArray[np.uint32], begins: NDArray[Any], path: Path, name: str
) -> None:
    """Each stretch of `keys` between two begins must rise strictly."""
    if len(keys) < 2:
        return
    rises = keys[1:] > keys[:-1]
    inner = np.asarray(begins, np.int64)
    inner = inner[(inner > 0) & (inner < len(keys))]
    rises[inner - 1] = True
    _require(bool(rises.all()), path, f"{name} must rise strictly among siblings")


def _check_meta(meta: NDArray[np.uint8], flags: int, longest: int, path: Path, name: str) -> None:
    """No bit but `flags` and the state length, which is at most `longest`."""
    if not len(meta):
        return
    _require(
        not int(np.bitwise_or.reduce(meta)) & ~(flags | layout.STATE_LENGTH_MASK),
        path,
        f"{name} has a reserved bit set",
    )
    _require(
        int((meta & layout.STATE_LENGTH_MASK).max()) <= longest,
        path,
        f"{name}: a state has at most {longest} words",
    )


def _check_values(
    log10_prob: NDArray[np.float32], backoff: NDArray[np.float32], path: Path, name: str
) -> None:
    """Values that no ARPA file can have must not become a score; a comparison with NaN is false."""
    _require(bool((log10_prob <= 0).all()), path, f"{name}: log10 probabilities are 0 or less")
    _require(bool(np.isfinite(backoff).all()), path, f"{name}: back-off weights are finite")


@dataclass(frozen=True, eq=False)
class LowOrders:
    """1- and 2-grams, with the bit that says whether anything is stored under a pair.

    `columns` is what `kernels.score_groups` takes as `low`.
    """

    manifest: Manifest
    columns: Columns

    @classmethod
    def open(
        cls, directory: Path, manifest: Manifest, *, verify: bool = True, values: bool = True
    ) -> LowOrders:
        """Maps the file in `directory`; raises `ShardFormatError` where it is damaged.

        Args
            verify  check its checksum
            values  check every value too; `verify.verify` does that itself, rule by rule
        """
        entry = manifest.file("low_orders")
        path = directory / entry.name
        a = map_columns(path, entry, verify=verify)
        size = manifest.vocabulary_size
        for name in ("unigram_log10_prob", "unigram_backoff", "unigram_meta"):
            _require(len(a[name]) == size, path, f"{name} must have {size} values")
        pairs = len(a["bigram_word"])
        _require(pairs <= 0xFFFFFFFF, path, "2-grams must be numbered in 32 bits")
        for name in ("bigram_log10_prob", "bigram_backoff", "bigram_meta"):
            _require(len(a[name]) == pairs, path, f"{name} must have {pairs} values")
        _check_begins(a["bigram_begin"], size, pairs, path, "bigram_begin")
        _require(pairs == 0 or int(a["bigram_word"].max()) < size, path, "bigram_word: word ids")
        _check_sorted_within(a["bigram_word"], a["bigram_begin"], path, "bigram_word")
        _require(manifest.order > 1 or pairs == 0, path, "a model of order 1 has no 2-grams")
        longest = manifest.order - 1
        _check_meta(a["unigram_meta"], layout.BLANK, min(longest, 1), path, "unigram_meta")
        flags = layout.BLANK | layout.STORED
        _check_meta(a["bigram_meta"], flags, min(longest, 2), path, "bigram_meta")
        for name in ("unigram", "bigram") if values else ():
            _check_values(a[f"{name}_log10_prob"], a[f"{name}_backoff"], path, name)
        return cls(manifest, tuple(a[name] for name in layout.LOW_ORDER_COLUMNS))

    @property
    def pairs(self) -> int:
        """2-grams, blanks included."""
        return len(self.columns[4])


def open_vocabulary(directory: Path, manifest: Manifest, *, verify: bool = True) -> Vocabulary:
    """The words of a shard set; raises `ShardFormatError` where the file is damaged."""
    entry = manifest.file("vocabulary")
    path = directory / entry.name
    a = map_columns(path, entry, verify=verify)
    begin = a["word_begin"]
    _check_begins(begin, manifest.vocabulary_size, len(a["word_bytes"]), path, "word_begin")
    data = a["word_bytes"].tobytes()
    edges = begin.tolist()
    words = [data[i:j] for i, j in pairwise(edges)]
    try:
        return Vocabulary(words, unk_in_model=manifest.unk_in_model)
    except ValueError as exc:
        raise ShardFormatError(f"{path} breaks the format: {exc}") from exc


class Shard:
    """One shard of a shard set, with the low orders beside it.

    `Shard.open` is the way to make one.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, index: int, low: LowOrders, arrays: Arrays
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.index = index
        self.low = low
        self.arrays = arrays
        self.order = manifest.order
        self.vocabulary_size = manifest.vocabulary_size
        self.columns: Columns = tuple(arrays[name] for name in layout.SHARD_COLUMNS)

    @classmethod
    def open(
        cls,
        directory: Path,
        index: int,
        *,
        verify: bool = True,
        manifest: Manifest | None = None,
        low: LowOrders | None = None,
        values: bool = True,
    ) -> Shard:
        """Maps shard `index` of the shard set in `directory`.

        Args
            verify         check the checksum of each file; offsets and keys are checked regardless
            values         check every value too, as `LowOrders.open`
            manifest, low  those of the same set, where already open
        Raises
            ShardFormatError  a file is missing, damaged or contradicts the manifest
        """
        directory = Path(directory)
        manifest = read_manifest(directory) if manifest is None else manifest
        entry = manifest.file("shard", index)
        low = LowOrders.open(directory, manifest, verify=verify) if low is None else low
        path = directory / entry.name
        arrays = map_columns(path, entry, verify=verify)
        _check_tree(arrays, manifest, entry, low, path)
        if values:
            _check_values(arrays["gram_log10_prob"], arrays["node_backoff"], path, "gram and node")
        return cls(directory, manifest, index, low, arrays)

    @cached_property
    def owned(self) -> NDArray[np.bool_]:
        """(4096,) bool: the slots of this shard."""
        owned: NDArray[np.bool_] = self.manifest.slots == self.index
        return owned

    def check(self, groups: QueryGroups) -> None:
        """Raises `QueryError` where arrays do not fit each other or hold what no query can."""
        lengths = groups.context_lengths
        check_groups(groups)
        if len(lengths) and not (int(lengths.min()) >= 2 and int(lengths.max()) < self.order):
            raise QueryError(
                f"contexts of {int(lengths.min())} to {int(lengths.max())} words were sent; "
                f"shards of an order-{self.order} model answer 2 to {self.order - 1}"
            )
        for ids in (groups.context_words, groups.words):
            if len(ids) and int(ids.max()) >= self.vocabulary_size:
                raise QueryError(
                    f"word id {int(ids.max())} was sent; ids are below {self.vocabulary_size}"
                )

    def score(self, groups: QueryGroups) -> Answers:
        """Answers to every query, in order; one kernel call, without the GIL.

        Trusts  `check` has passed, and the contexts are owned by this shard
        """
        return run_kernel(self.low, self.columns, self.order, groups)[0]


def check_groups(groups: QueryGroups) -> None:
    """Raises `QueryError` where the arrays of `groups` have a wrong type or length."""
    lengths, counts = groups.context_lengths, groups.word_counts
    for array, dtype in (
        (lengths, np.uint8),
        (groups.context_words, np.uint32),
        (counts, np.uint32),
        (groups.words, np.uint32),
    ):
        if array.dtype != dtype or array.ndim != 1:
            raise QueryError(
                f"an array of {array.dtype} with {array.ndim} dimensions was sent, "
                f"expected {np.dtype(dtype)} with 1"
            )
    context_total = int(lengths.sum(dtype=np.uint64))
    word_total = int(counts.sum(dtype=np.uint64))
    if (len(counts), len(groups.context_words), len(groups.words)) != (
        len(lengths),
        context_total,
        word_total,
    ):
        raise QueryError(
            f"{len(lengths)} contexts of {context_total} words in all, and {len(counts)} counts of "
            f"{word_total} words in all, were sent with {len(groups.context_words)} context words "
            f"and {len(groups.words)} words"
        )


def run_kernel(
    low: LowOrders, tree: Columns, order: int, groups: QueryGroups
) -> tuple[Answers, NDArray[np.uint8]]:
    """One call of `kernels.score_groups`; the answers, and per context whether a shard is needed.

    Trusts  `groups` was checked: `Shard.check`, `local.LocalModel.score`
    """
    context_begin = np.zeros(len(groups.context_lengths) + 1, np.int64)
    np.cumsum(groups.context_lengths, out=context_begin[1:])
    word_begin = np.zeros(len(groups.word_counts) + 1, np.int64)
    np.cumsum(groups.word_counts, out=word_begin[1:])
    answers = Answers.empty(len(groups.words))
    needs_shard = np.empty(len(groups.context_lengths), np.uint8)
    kernels.score_groups(
        low.columns,
        tree,
        order,
        context_begin,
        groups.context_words,
        word_begin,
        groups.words,
        answers.log10_prob,
        answers.matched_order,
        answers.ngram_length,
        answers.state_length,
        needs_shard,
    )
    return answers, needs_shard


def _check_tree(
    a: Arrays, manifest: Manifest, entry: layout.FileEntry, low: LowOrders, path: Path
) -> None:
    """What the kernel relies on; `ShardFormatError` where it does not hold."""
    levels = max(manifest.order - 2, 0)
    begin = a["level_begin"]
    nodes, grams, size = len(a["node_key"]), len(a["gram_word"]), manifest.vocabulary_size
    _check_begins(begin, levels, nodes, path, "level_begin")
    _require(len(a["node_backoff"]) == nodes, path, f"node_backoff must have {nodes} values")
    for name in ("gram_log10_prob", "gram_meta"):
        _require(len(a[name]) == grams, path, f"{name} must have {grams} values")
    _require(entry.nodes == nodes, path, f"the manifest says {entry.nodes} nodes")
    _require(
        entry.ngrams + entry.blanks == grams,
        path,
        f"the manifest says {entry.ngrams} n-grams and {entry.blanks} blanks",
    )
    _check_begins(a["node_gram"], nodes, grams, path, "node_gram")
    _check_begins(a["node_child"], nodes, nodes, path, "node_child")
    _require(grams == 0 or int(a["gram_word"].max()) < size, path, "gram_word: word ids")
    _check_sorted_within(a["gram_word"], a["node_gram"], path, "gram_word")
    roots = int(begin[1]) if levels else 0
    key = a["node_key"]
    _require(roots == 0 or int(key[:roots].max()) < low.pairs, path, "node_key: 2-grams")
    _require(roots == nodes or int(key[roots:].max()) < size, path, "node_key: word ids")
    _check_sorted_within(key[:roots], np.zeros(1, np.int64), path, "node_key")
    child = a["node_child"]
    for level in range(levels):
        first, last = int(begin[level]), int(begin[level + 1])
        if first == last:
            continue
        below = int(begin[min(level + 2, levels)])
        _require(
            int(child[first]) == last and int(child[last]) == below,
            path,
            f"the children of level {level} must be level {level + 1}",
        )
        grams_here = a["gram_meta"][int(a["node_gram"][first]) : int(a["node_gram"][last])]
        longest = min(level + 3, manifest.order - 1)  # level 0 holds 3-grams
        _check_meta(grams_here, layout.BLANK, longest, path, "gram_meta")
    _check_sorted_within(key[roots:], np.asarray(child, np.int64) - roots, path, "node_key")
