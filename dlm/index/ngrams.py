"""Holds a model's n-grams as sorted arrays, with the blanks that close the set under suffixes.

A model is closed under prefixes, so an n-gram's key needs only 64 bits: the rank of its prefix
among the shorter n-grams, and its last word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.errors import ArpaError, KenlmFormatError
from dlm.index.packed import kernels
from dlm.index.packed.low import key_bits_of, mirrored
from dlm.ngram.backoff import Ngram, score as score_over_dict
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB, Vocabulary

if TYPE_CHECKING:
    from dlm.kenlm.reader import NgramReader

Raw = list[tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]]

U32 = np.uint32
I64 = np.int64
F32 = np.float32
_WORD_BITS = np.uint64(32)
_MOST_NGRAMS = (1 << 32) - 1  # per order: a rank is half of a sort key


@dataclass
class OrderTable:
    """The n-grams of one order, by prefix, then by the key of their last word; 1-grams by id.

    Shapes  rows (n, order)  word ids, oldest first
            log10_prob, log10_backoff (n,)  0 for blanks and where the model has none
            blank (n,)   added to close the set under suffixes; not in the model
            prefix (n,)  rank of the prefix one order down (0 for 1-grams)
    """

    rows: NDArray[np.uint32]
    log10_prob: NDArray[np.float32]
    log10_backoff: NDArray[np.float32]
    blank: NDArray[np.bool_]
    prefix: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class NgramTables:
    vocabulary: Vocabulary
    tables: list[OrderTable]

    @property
    def order(self) -> int:
        return len(self.tables)

    def counts(self) -> tuple[int, ...]:
        """Returns the number of n-grams of each order, without blanks."""
        return tuple(int(len(t) - t.blank.sum()) for t in self.tables)

    def blanks(self) -> tuple[int, ...]:
        return tuple(int(t.blank.sum()) for t in self.tables)

    def sort_keys(self, prefix: NDArray[np.int64], word: NDArray[np.uint32]) -> NDArray[np.uint64]:
        return pack_keys(prefix, mirrored(word, key_bits_of(len(self.vocabulary))))

    def ranks(self, rows: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns the rank (n,) of each row (n, k) among the n-grams of k words; -1: not found."""
        ranks = rows[:, 0].astype(I64)
        for k in range(2, rows.shape[1] + 1):
            table = self.tables[k - 1]
            ranks = find_keys(
                self.sort_keys(table.prefix, table.rows[:, -1]),
                self.sort_keys(ranks, rows[:, k - 1]),
                ranks,
            )
        return ranks

    def model_id(self) -> str:
        """Returns the XXH3-128, in hex, of the model's words and of its n-grams with their values.

        Neither sharding nor the file's sequence of n-grams matters: an order's hashes are summed.
        """
        digest = xxhash.xxh3_128()
        for word in self.vocabulary.words:
            digest.update(len(word).to_bytes(8, "little") + word)
        digest.update(bytes([self.order, self.vocabulary.unk_in_model]))
        for table in self.tables:
            keep = ~table.blank
            sums = kernels.hash_ngrams(
                table.rows[keep],
                table.log10_prob[keep].view(np.uint32),
                table.log10_backoff[keep].view(np.uint32),
            )
            for number in (int(keep.sum()), *sums.tolist()):
                digest.update(int(number).to_bytes(8, "little"))
        return str(digest.hexdigest())


def pack_keys(prefix: NDArray[np.int64], key: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Packs sort keys: the rank of the prefix, then the key of the last word."""
    return (prefix.astype(np.uint64) << _WORD_BITS) | key.astype(np.uint64)


def find_keys(
    keys: NDArray[np.uint64], wanted: NDArray[np.uint64], prefix: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the index of each wanted key in the sorted `keys`; -1 if absent or `prefix` is -1."""
    if not len(keys):
        return np.full(len(wanted), -1, I64)
    at = np.searchsorted(keys, wanted)
    clipped = np.minimum(at, len(keys) - 1)
    return np.where((keys[clipped] == wanted) & (prefix >= 0), clipped, -1).astype(I64)


def begins_of(parent: NDArray[np.int64], parents: int) -> NDArray[np.int64]:
    """Returns where each parent's children begin when sorted by parent, and where the last end."""
    begins = np.zeros(parents + 1, I64)
    np.cumsum(np.bincount(parent, minlength=parents), out=begins[1:])
    return begins


def read_raw(reader: NgramReader) -> Raw:
    """The n-grams of each order as in the file: ids, log10_prob, log10_backoff."""
    parts: list[Raw] = [[] for _ in range(reader.order)]
    for batch in reader.batches():
        parts[batch.order - 1].append((batch.ids, batch.log10_prob, batch.log10_backoff))
    raw: Raw = []
    for k, batches in enumerate(parts, 1):
        ids = np.concatenate([b[0] for b in batches]) if batches else np.zeros((0, k), U32)
        prob = np.concatenate([b[1] for b in batches]) if batches else np.zeros(0, F32)
        backoff = np.concatenate([b[2] for b in batches]) if batches else np.zeros(0, F32)
        raw.append((ids, prob, backoff))
        batches.clear()
    return raw


def sorted_tables(
    vocabulary: Vocabulary,
    raw: Raw,
    reader: NgramReader | None = None,
) -> NgramTables:
    """Sorts the n-grams of each order.

    Raises  ArpaError  an n-gram is repeated, or its prefix is missing
    Cost    memory: about 90 bytes per n-gram at its peak
    """
    ids, prob, backoff = raw[0]
    size = len(vocabulary)
    unigrams = OrderTable(
        np.arange(size, dtype=U32)[:, None],
        np.full(size, MISSING_UNK_LOG10_PROB, F32),
        np.zeros(size, F32),
        np.ones(size, np.bool_),
        np.zeros(size, I64),
    )
    unigrams.log10_prob[ids[:, 0]] = prob
    unigrams.log10_backoff[ids[:, 0]] = backoff
    unigrams.blank[ids[:, 0]] = False
    tables = NgramTables(vocabulary, [unigrams])
    for k, (ids, prob, backoff) in enumerate(raw[1:], 2):
        if len(ids) > _MOST_NGRAMS:
            raise ArpaError(
                f"{len(ids)} n-grams of one order are too many; expected at most {_MOST_NGRAMS}. "
                "Prune the model, or lower its order",
                order=k,
            )
        prefix = tables.ranks(ids[:, :-1])
        missing = np.flatnonzero(prefix < 0)
        if k == 2 and not vocabulary.unk_in_model:
            missing = np.union1d(missing, np.flatnonzero(prefix == 0))
        if len(missing):
            row = int(missing[0])
            raise _fault(
                reader,
                f"the prefix {_spell(vocabulary, ids[row, :-1])} of the {k}-gram "
                f"{_spell(vocabulary, ids[row])} is not among the {k - 1}-grams "
                f"({len(missing)} such n-grams)",
                k,
                row,
                "Add the missing n-grams with --repair, which changes no score beyond its last bit",
            )
        keys = tables.sort_keys(prefix, ids[:, -1])
        place = np.argsort(keys, kind="stable")
        twice = np.flatnonzero(keys[place][1:] == keys[place][:-1])
        if len(twice):
            row = int(place[twice + 1].min())
            raise _fault(
                reader,
                f"the {k}-gram {_spell(vocabulary, ids[row])} is listed twice ({len(twice)} such "
                "n-grams)",
                k,
                row,
                "Remove one of the two lines",
            )
        tables.tables.append(
            OrderTable(
                ids[place], prob[place], backoff[place], np.zeros(len(ids), np.bool_), prefix[place]
            )
        )
    return tables


def with_prefixes(vocabulary: Vocabulary, raw: Raw) -> Raw:
    """Adds the missing prefixes to `raw`, after the n-grams of their order.

    A prefix gets the probability that back-off gives it, and no weight. Scores after the prefix's
    own context stay the same; after longer contexts the last bit may differ, since weights are now
    added to a rounded sum. The code is simple, since models that lack prefixes are rare.

    Raises  ArpaError  back-off gives a missing prefix a probability above 1
    """
    known: dict[Ngram, tuple[np.float32, np.float32]] = {}
    for ids, prob, backoff in raw:
        known.update(zip(map(tuple, ids.tolist()), zip(prob, backoff, strict=True), strict=True))
    added: list[list[Ngram]] = [[] for _ in raw]
    missing = {n[:end] for n in known for end in range(2, len(n)) if n[:end] not in known}
    for ngram in sorted(missing, key=lambda n: (len(n), n)):
        found = score_over_dict(known, set(), set(), len(raw), ngram[:-1], ngram[-1])
        if found.log10_prob > 0:
            raise _fault(
                None,
                f"the missing prefix {_spell(vocabulary, np.array(ngram))} cannot be repaired: "
                f"back-off gives it the log10 probability {found.log10_prob}, which is above 0",
                len(ngram),
                0,
                "Estimate the model again; its back-off weights do not make probabilities sum to 1",
            )
        known[ngram] = (found.log10_prob, F32(0))
        added[len(ngram) - 1].append(ngram)
    out = []
    for (ids, prob, backoff), new in zip(raw, added, strict=True):
        if new:
            ids = np.concatenate([ids, np.array(new, U32)])
            prob = np.concatenate([prob, np.array([known[n][0] for n in new], F32)])
            backoff = np.concatenate([backoff, np.zeros(len(new), F32)])
        out.append((ids, prob, backoff))
    return out


def _spell(vocabulary: Vocabulary, ids: NDArray[np.uint32]) -> str:
    return repr(b" ".join(vocabulary.words[i] for i in ids).decode("utf-8", "replace"))


def _fault(
    reader: NgramReader | None, message: str, order: int, row: int, advice: str
) -> ArpaError | KenlmFormatError:
    if reader is None:
        return ArpaError(message, order=order, advice=advice)
    return reader.error_at(message, order=order, row=row, advice=advice)
