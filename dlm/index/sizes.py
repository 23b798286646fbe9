"""Estimates the bytes of a model's shard set from one pass over its ARPA file.

Listing the words after two or more words needs sorting, so the size of ranks is estimated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.index.coding import Coding, ValueHistogram, coding_of, weight_bits
from dlm.index.packed.columns import BACKOFF_BITS, magnitudes_of
from dlm.index.packed.low import BLOCK_WORDS, ONE_FLAG, key_bits_of
from dlm.index.packed.record_kernels import WIDTH_BITS
from dlm.kenlm.open import open_ngrams
from dlm.progress import Tell

MANIFEST_BYTES = 12_000
FILE_BYTES = 2_500  # Arrow's headers, per file
SAMPLE = 1 << 20  # sampled values per order
# The maximum bits that a node takes for the code of its weight, for its key among its siblings, and
# for its distance from the first sibling.
NODE_WEIGHT_BITS, NODE_KEY_BITS, NODE_DISTANCE_BITS = 7, 15, 8


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The figures that the estimate is based on.

    contexts     by order: n-grams with a back-off weight; about as many contexts are nodes
    rank_bits    mean bits of a 3-gram's rank
    key_bits     mean bits of a 2-gram's key, with its share of the directory
    prob_bits    by order: bits of an exact probability's code
    runs         distinct probabilities of words
    weight_bits  by order: bits that distinguish the weights of a sample
    """

    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    word_bytes: int
    rank_bits: float
    key_bits: float
    prob_bits: tuple[int, ...]
    runs: int
    weight_bits: tuple[int, ...]


def measure(arpa: str | os.PathLike[str], *, progress: Tell = lambda line: None) -> ModelStatistics:
    """Measures a model in one pass; raises `ArpaError` or `KenlmFormatError` if it is malformed."""
    with open_ngrams(arpa, progress=progress) as reader:
        order = reader.order
        contexts = [0] * order
        weights: list[list[NDArray[np.float32]]] = [[] for _ in range(order)]
        kept = [0] * order
        spans = [ValueHistogram(0 if k else None, np.uint32) for k in range(order)]
        sizes = np.zeros(0, np.int64)
        rank_sum = 0.0
        for batch in reader.batches():
            k = batch.order
            contexts[k - 1] += int(np.count_nonzero(batch.log10_backoff))
            spans[k - 1].add(magnitudes_of(batch.log10_prob))
            if kept[k - 1] < SAMPLE:
                weights[k - 1].append(np.unique(batch.log10_backoff))
                kept[k - 1] += len(batch)
            if k == 2:
                if not len(sizes):
                    sizes = np.zeros(len(reader.vocabulary), np.int64)
                sizes += np.bincount(batch.ids[:, 0], minlength=len(sizes))
            elif k == 3:
                of_list = np.maximum(sizes[batch.ids[:, 1]], 1)
                rank_sum += float(np.ceil(np.log2(of_list)).sum())
        counts = tuple(reader.counts)
        words = reader.vocabulary.words
    distinct = [len(np.unique(np.concatenate([*w, np.zeros(1, np.float32)]))) for w in weights]
    b = max(key_bits_of(len(words)) - 1, 1)  # the ids of frequent words are shorter
    listed = sizes[sizes > 0]
    # A list of n > 8 entries stores b - t of a key's b bits, where t = bits(n) - 3; its directory
    # takes about bits(n) bits for every 4 to 8 entries.
    bits = np.floor(np.log2(np.maximum(listed, 1))) + 1
    key = np.where(listed > 8, b - (bits - 3) + bits * 2.0 ** (bits - 3) / np.maximum(listed, 1), b)
    pairs = max(int(listed.sum()), 1)
    return ModelStatistics(
        counts=counts,
        contexts=tuple(contexts),
        word_bytes=sum(map(len, words)),
        rank_bits=rank_sum / max(counts[2] if order > 2 else 0, 1),
        key_bits=float((key * listed).sum()) / pairs,
        prob_bits=tuple(span.code().bits for span in spans),
        runs=len(spans[0].values),
        weight_bits=tuple(max(n - 1, 0).bit_length() for n in distinct),
    )


# Bytes a client needs per word besides letters: an object, list slot, dictionary entry, number.
WORD_BYTES = 110


@dataclass(frozen=True, slots=True)
class ShardSetSizes:
    """Approximate bytes of a shard set on disk, and in memory of servers and clients.

    shard   bytes of one shard's file, as if all shards were equally large
    shards  number of shards
    words   bytes of the vocabulary's strings, and the number of words
    """

    vocabulary: int
    low_orders: int
    shard: int
    shards: int
    words: tuple[int, int]

    @property
    def disk(self) -> int:
        return self.vocabulary + self.low_orders + self.shard * self.shards + MANIFEST_BYTES

    @property
    def client(self) -> int:
        """Bytes of memory for clients: the low orders once per host, the words in each process."""
        strings, words = self.words
        return self.vocabulary + self.low_orders + strings + WORD_BYTES * words


def estimate_sizes(
    m: ModelStatistics, shards: int, encoding: str, bits: int | None = None
) -> ShardSetSizes:
    """Estimates the size of a shard set.

    Guarantees  `disk` is within 10 % for a model of sentences, pruned or not, of at least 1 MB
    """
    coding = coding_of(encoding, bits)
    words, order = m.counts[0], len(m.counts)
    strings = m.word_bytes + words
    weight = _weight_bits(m, coding, 1)
    pairs = m.counts[1] if order > 1 else 0
    offset = pairs.bit_length() + (60 * pairs).bit_length()
    low = words * 64 // BLOCK_WORDS + m.runs * 32
    low += m.contexts[0] * (offset + WIDTH_BITS + weight)
    if order > 1:
        low += int(pairs * (ONE_FLAG + _prob_bits(m, coding, 2) + m.key_bits))
    trees = 0
    previous = m.rank_bits
    for k in range(3, order + 1):
        nodes = min(m.contexts[k - 2], m.counts[k - 1]) if k > 3 else m.contexts[1]
        grams = m.counts[k - 1]
        rank = m.rank_bits
        if k > 3:
            # Fewer words follow longer contexts: each further word about halves the bits of a rank.
            rank = previous / 2
        previous = rank
        value = _prob_bits(m, coding, k) + (k < order)
        of_grams = int(grams * (value + rank))
        # A record stores how many words follow it and how many nodes are below it, its weight, its
        # key and its distance among its siblings; a root also stores how many bits a rank has.
        head = 2 + 1.5 * (k < order)
        head += min(_weight_bits(m, coding, k - 1), NODE_WEIGHT_BITS)
        if k > 3:
            head += min(key_bits_of(words), NODE_KEY_BITS) + NODE_DISTANCE_BITS
        else:
            head += 17 + np.log2(8 * of_grams / max(nodes, 1) + 2)
        trees += of_grams + int(nodes * head)
    return ShardSetSizes(
        strings + FILE_BYTES,
        low // 8 + FILE_BYTES,
        trees // 8 // shards + FILE_BYTES,
        shards,
        (m.word_bytes, words),
    )


def _prob_bits(m: ModelStatistics, coding: Coding, order: int) -> int:
    return m.prob_bits[order - 1] if coding.bits is None else coding.bits


def _weight_bits(m: ModelStatistics, coding: Coding, order: int) -> int:
    if coding.bits is not None and order > 1:
        return min(weight_bits(coding.bits), m.weight_bits[order - 1])
    return min(m.weight_bits[order - 1], BACKOFF_BITS)
