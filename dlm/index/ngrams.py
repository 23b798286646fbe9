"""The n-grams of a model as sorted arrays, and their closure under suffixes.

An n-gram is looked up by ranks: the rank of its prefix among the shorter n-grams and its last word
make one 64-bit key, and the keys of an order are sorted. That works because a model is closed
under prefixes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.errors import ArpaError
from dlm.index.layout import MAX_ORDER
from dlm.index.packed import kernels
from dlm.index.packed.low import key_bits_of, keys_of
from dlm.ngram.arpa import ArpaReader
from dlm.ngram.backoff import Ngram
from dlm.ngram.backoff import score as score_over_dict
from dlm.ngram.vocab import MISSING_UNK_LOG10_PROB, Vocabulary

Raw = list[tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]]

U32 = np.uint32
I64 = np.int64
F32 = np.float32
_WORD_BITS = np.uint64(32)
_MOST_NGRAMS = (1 << 32) - 1  # of one order: a rank is half of a sort key


@dataclass
class OrderTable:
    """The n-grams of one order, sorted by their prefix, then by the key of their last word.

    1-grams are sorted by their ids.

    Shapes
        rows     (n, order) uint32  word ids, oldest first
        log10_prob, log10_backoff (n,) float32; 0 for blanks and where the model has none
        blank    (n,)  bool    put in to close the set under suffixes; no n-gram of the model
        prefix   (n,)  int64   rank of the prefix one order down (0 for 1-grams)
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
    """A whole model: `tables[k - 1]` holds order k."""

    vocabulary: Vocabulary
    tables: list[OrderTable]

    @property
    def order(self) -> int:
        """N."""
        return len(self.tables)

    def counts(self) -> tuple[int, ...]:
        """N-grams of the model by order, blanks not counted."""
        return tuple(int(len(t) - t.blank.sum()) for t in self.tables)

    def blanks(self) -> tuple[int, ...]:
        """Blanks by order."""
        return tuple(int(t.blank.sum()) for t in self.tables)

    def sort_keys(self, prefix: NDArray[np.int64], word: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """What the n-grams of an order above 1 are sorted by: see `pack_keys`."""
        return pack_keys(prefix, keys_of(word, key_bits_of(len(self.vocabulary))))

    def ranks(self, rows: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Rank of each row among the n-grams of its length, -1 where there is none.

        Shapes
            rows     (n, k) uint32
        Returns      (n,)   int64
        """
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
        """XXH3-128, in hex, of the words and of every n-gram of the model with its values.

        The same for the same model, however its file was written or sharded: the n-grams of an
        order are hashed each for itself and the hashes added (`packed.kernels.hash_ngrams`).
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
    """Sort keys: rank of the prefix, then the key of the last word."""
    return (prefix.astype(np.uint64) << _WORD_BITS) | key.astype(np.uint64)


def find_keys(
    keys: NDArray[np.uint64], wanted: NDArray[np.uint64], prefix: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Place of each wanted key in the sorted `keys`; -1 where absent or where `prefix` is -1."""
    if not len(keys):
        return np.full(len(wanted), -1, I64)
    at = np.searchsorted(keys, wanted)
    clipped = np.minimum(at, len(keys) - 1)
    return np.where((keys[clipped] == wanted) & (prefix >= 0), clipped, -1).astype(I64)


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
        memory: some 90 bytes an n-gram at its peak
    """
    with ArpaReader(path) as reader:
        if reader.order > MAX_ORDER:
            raise ArpaError(
                f"the model has order {reader.order}, {MAX_ORDER} is the largest that shards hold",
                path=reader.path,
            )
        raw = read_raw(reader)
        vocabulary = reader.vocabulary
    tables = sorted_tables(vocabulary, raw, reader, repair=repair)
    close_under_suffixes(tables)
    return tables, reader


def read_raw(reader: ArpaReader) -> Raw:
    """The n-grams of each order as they stand in the file: ids, log10_prob, log10_backoff."""
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
    reader: ArpaReader | None = None,
    *,
    repair: bool = False,
) -> NgramTables:
    """Sorts the n-grams of each order; see `read_tables` for what is refused."""
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
    if repair:
        raw = _with_prefixes(vocabulary, raw)
    for k, (ids, prob, backoff) in enumerate(raw[1:], 2):
        if len(ids) > _MOST_NGRAMS:
            raise ArpaError(f"{len(ids)} n-grams; an order holds {_MOST_NGRAMS} at most", order=k)
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
                f"({len(missing)} such)",
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
                f"the {k}-gram {_spell(vocabulary, ids[row])} stands twice ({len(twice)} such)",
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


def _with_prefixes(vocabulary: Vocabulary, raw: Raw) -> Raw:
    """`raw` with the missing prefixes added. Plain code: models that need it are rare."""
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
                f"back-off gives it log10 probability {found.log10_prob}, above 0",
                len(ngram),
                0,
                "Estimate the model again; its back-off weights do not normalise it",
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


def _spell(vocabulary: Vocabulary, ids: NDArray[np.uint32]) -> str:
    return repr(b" ".join(vocabulary.words[i] for i in ids).decode("utf-8", "replace"))


def _fault(reader: ArpaReader | None, message: str, order: int, row: int, advice: str) -> ArpaError:
    if reader is None:
        return ArpaError(message, order=order, advice=advice)
    return reader.error_at(message, order=order, row=row, advice=advice)
