"""Reads the layout of a KenLM binary file: the header, and the sections that it determines.

When a file is opened, the header is read and every section is checked against the file's size;
DESIGN.md has the layout. KenLM's files have no checksums, so other damage may go unnoticed.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dlm.errors import KenlmFormatError
from dlm.memory_options import MAPPED, MemoryOptions, hold

Data = NDArray[np.uint8]

# DO NOT CHANGE: KenLM's files on disk have these values.
PREFIX = b"mmap lm http://kheafield.com/code "
_VERSIONED = PREFIX + b"format version "
_VERSION = 5
_SANITY = struct.Struct("<56s3f3IQ")
REFERENCE = _SANITY.pack(_VERSIONED + b"5\n\0", 0.0, 1.0, -0.5, 1, 0xFFFFFFFF, 0, 1)
FIXED = struct.Struct("<B3xfIB3xI")
_SEARCH_VERSION = {False: 0, True: 1}  # version, by whether the file has a trie
_QUANTISED_VERSION, _ARRAY_VERSION, _PROBING_VERSION = 2, 0, 0
_FIRST_WORD = b"<unk>\0"
DAMAGED = "Copy the file again, or rebuild it from its ARPA file"
MAX_ORDER = 15  # dlm's limit for all models: a state length has four bits on the wire
_MAX_COUNT = 1 << 57  # KenLM's limit: a pointer is read in one load
_MAX_CODE_BITS = 25  # KenLM's limit


class ModelType(IntEnum):
    """KenLM's six data structures, by the number in the header."""

    PROBING = 0
    REST_PROBING = 1
    TRIE = 2
    QUANT_TRIE = 3
    ARRAY_TRIE = 4
    QUANT_ARRAY_TRIE = 5

    @property
    def is_trie(self) -> bool:
        return self >= ModelType.TRIE

    @property
    def is_quantised(self) -> bool:
        """Whether values are codes (`build_binary -q`)."""
        return self in (ModelType.QUANT_TRIE, ModelType.QUANT_ARRAY_TRIE)

    @property
    def has_arrays(self) -> bool:
        """Whether the high bits of pointers are in a table (`build_binary -a`)."""
        return self in (ModelType.ARRAY_TRIE, ModelType.QUANT_ARRAY_TRIE)


@dataclass(frozen=True, slots=True)
class Level:
    """The n-grams of one order from 2 up. Places are bytes from the start of the file; 0: none.

    at             where the entries begin
    entries        probing: buckets, some of them empty; trie: `count`
    entry_size     probing: bytes of a bucket; trie: bits of an entry
    word_bits      trie: width of the word, the first field of an entry
    prob_bits      trie: width of the probability, or of its code
    backoff_bits   trie: width of the back-off weight, or of its code; 0 at the longest order
    next_bits      trie: width of the last field, the pointer to the first child, without high bits
    highs_at       trie with arrays: where the table of the pointers' high bits begins. For each
                   value of these bits, it has the first entry with that value, u64
    highs          trie with arrays: number of values of the high bits
    probs_at       quantised: where the float32 probabilities are, by code
    backoffs_at    quantised: where the float32 back-off weights are, by code
    """

    order: int
    count: int
    at: int
    entries: int
    entry_size: int
    word_bits: int = 0
    prob_bits: int = 0
    backoff_bits: int = 0
    next_bits: int = 0
    highs_at: int = 0
    highs: int = 0
    probs_at: int = 0
    backoffs_at: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Says where the parts of a file are, in bytes from the start of the file.

    order, counts     N, and the numbers of n-grams by order; in a trie, KenLM's blanks are included
    multiplier        probing: buckets per n-gram, in float32
    words             the number of words, including <unk>; ids are below it
    hashes_at         the words' hashes. Probing: buckets of u64 hash, u32 id. Trie: sorted u64; the
                      id is the rank, from 1
    hashes            number of buckets; in a trie, of words without <unk>
    unigrams_at       1-grams by id: f32 probability, f32 back-off weight; then f32 rest cost
                      (REST_PROBING), or u64 first child (tries)
    levels            orders 2, 3, ...
    words_at          where the words are: by id, each ended by a zero byte; None: not stored (`-v`)
    """

    path: str
    model_type: ModelType
    order: int
    counts: tuple[int, ...]
    multiplier: float
    words: int
    hashes_at: int
    hashes: int
    unigrams_at: int
    unigram_bytes: int
    levels: tuple[Level, ...]
    words_at: int | None
    size: int


def is_kenlm(head: bytes) -> bool:
    """Whether a file that begins with these bytes is one of KenLM's, complete or not."""
    return head.startswith(PREFIX)


def is_kenlm_file(path: str | os.PathLike[str]) -> bool:
    if not os.path.isfile(path):  # noqa: PTH113 - a pipe is not opened: that would take its content
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
        return is_kenlm(file.read(len(PREFIX)))
    return False


def open_file(
    path: str | os.PathLike[str], *, memory_options: MemoryOptions = MAPPED
) -> tuple[Data, Layout]:
    """Maps a KenLM binary file; processes that open it share its pages.

    Returns  the bytes of the file, read-only, (size,) uint8; and the layout
    Raises  KenlmFormatError  the file is not KenLM's, or is incomplete, damaged, cut, or of another
                              version or byte order
            OSError           the file cannot be read
    Cost     reads some pages, whatever the size of the file
    """
    with open(path, "rb") as file:  # noqa: PTH123
        size = os.fstat(file.fileno()).st_size
        if size < len(REFERENCE):
            _check_head(file.read(len(REFERENCE)), os.fspath(path))
        data = np.frombuffer(hold(file, size, memory_options), np.uint8)
    return data, read_layout(data, os.fspath(path))


def read_layout(data: Data, path: str) -> Layout:
    """Reads the layout from a file's bytes; raises KenlmFormatError as `open_file` does."""
    _check_head(data[: len(REFERENCE)].tobytes(), path)
    at = len(REFERENCE)
    fault = _Faults(path, len(data))
    fault.check_end(at + FIXED.size, "header")
    order, multiplier, kind, has_words, version = FIXED.unpack_from(data.data, at)
    at += FIXED.size
    if kind not in list(ModelType):
        raise fault(f"the model has type {kind}; KenLM has types 0 to 5", "header")
    model_type = ModelType(kind)
    if version != _SEARCH_VERSION[model_type.is_trie]:
        raise fault(
            f"the {model_type.name} has search version {version}; expected "
            f"{_SEARCH_VERSION[model_type.is_trie]}",
            "header",
            advice="Rebuild the file with the current `build_binary`",
        )
    if not 2 <= order <= MAX_ORDER:
        raise fault(f"the model has order {order}; expected 2 to {MAX_ORDER}", "header")
    if not (math.isfinite(multiplier) and multiplier >= 1):
        raise fault(f"the probing multiplier is {multiplier}; expected 1 or more", "header")
    if has_words not in (0, 1):
        raise fault(f"the flag for stored words is {has_words}; expected 0 or 1", "header")
    fault.check_end(at + 8 * order, "header")
    counts = struct.unpack_from(f"<{order}Q", data.data, at)
    for n, count in enumerate(counts, 1):
        if count >= (_MAX_COUNT if n > 1 else 1 << 32) or (n == 1 and not count):
            raise fault(f"the header says {count} {n}-grams, which is impossible", "header")
    at = -(-(at + 8 * order) // 8) * 8
    read = _trie if model_type.is_trie else _probing
    words, hashes_at, hashes, unigrams_at, unigram_bytes, levels, at = read(
        data, fault, at, model_type, counts, multiplier
    )
    if has_words:
        fault.check_end(at + len(_FIRST_WORD), "words")
        if data[at : at + len(_FIRST_WORD)].tobytes() != _FIRST_WORD:
            raise fault("the first word is not <unk>", "words", at)
    return Layout(
        path,
        model_type,
        order,
        counts,
        multiplier,
        words,
        hashes_at,
        hashes,
        unigrams_at,
        unigram_bytes,
        levels,
        at if has_words else None,
        len(data),
    )


def buckets_of(count: int, multiplier: float) -> int:
    with np.errstate(over="ignore"):  # a damaged header may cause overflow
        wanted = float(np.float32(multiplier) * np.float32(count))
    return max(count + 1, int(min(wanted, _MAX_COUNT * 8)))


_Sections = tuple[int, int, int, int, int, tuple[Level, ...], int]


def _probing(
    data: Data,
    fault: _Faults,
    at: int,
    model_type: ModelType,
    counts: tuple[int, ...],
    multiplier: float,
) -> _Sections:
    fault.check_end(at + 8, "vocabulary")
    version, words = struct.unpack_from("<2I", data.data, at)
    if version != _PROBING_VERSION:
        raise fault(
            f"the vocabulary has version {version}; expected {_PROBING_VERSION}", "vocabulary", at
        )
    # If the ARPA file has no <unk>, there is one more word than there are 1-grams.
    if not counts[0] <= words <= counts[0] + 1:
        raise fault(
            f"the vocabulary has {words} words; expected one for each of {counts[0]} 1-grams",
            "vocabulary",
            at,
        )
    hashes_at, hashes = at + 8, buckets_of(counts[0], multiplier)
    unigrams_at = hashes_at + 12 * hashes
    value_bytes = 12 if model_type is ModelType.REST_PROBING else 8
    at = unigrams_at + value_bytes * (counts[0] + 1)
    fault.check_end(at, "1-grams")
    levels = []
    for order, count in enumerate(counts[1:], 2):
        size = 12 if order == len(counts) else 8 + value_bytes
        level = Level(order, count, at, buckets_of(count, multiplier), size)
        at += level.entries * size
        fault.check_end(at, f"{order}-grams")
        levels.append(level)
    return words, hashes_at, hashes, unigrams_at, value_bytes, tuple(levels), at


def _trie(
    data: Data,
    fault: _Faults,
    at: int,
    model_type: ModelType,
    counts: tuple[int, ...],
    multiplier: float,
) -> _Sections:
    fault.check_end(at + 8 + 8 * counts[0], "vocabulary")
    (hashes,) = struct.unpack_from("<Q", data.data, at)
    if hashes != counts[0] - 1:
        raise fault(
            f"the vocabulary has {hashes} words besides <unk>; expected {counts[0] - 1}, one for "
            "each other 1-gram",
            "vocabulary",
            at,
        )
    hashes_at, at = at + 8, at + 8 + 8 * counts[0]
    longest = len(counts)
    prob_bits = backoff_bits = 0
    codes: dict[int, tuple[int, int]] = dict.fromkeys(range(2, longest + 1), (0, 0))
    if model_type.is_quantised:
        fault.check_end(at + 8, "codes")
        version, prob_bits, backoff_bits = data[at : at + 3].tolist()
        if version != _QUANTISED_VERSION:
            raise fault(f"codes have version {version}; expected {_QUANTISED_VERSION}", "codes", at)
        for bits in (prob_bits, backoff_bits):
            if not 1 <= bits <= _MAX_CODE_BITS:
                raise fault(f"a code has {bits} bits; expected 1 to {_MAX_CODE_BITS}", "codes", at)
        at += 8
        for order in range(2, longest + 1):
            codes[order] = at, (at + (4 << prob_bits)) * (order < longest)
            at += (4 << prob_bits) + (4 << backoff_bits) * (order < longest)
        fault.check_end(at, "codes")
    unigrams_at, at = at, at + 16 * (counts[0] + 2)
    fault.check_end(at, "1-grams")
    word_bits = counts[0].bit_length()
    chopped = None
    levels = []
    for order, count in enumerate(counts[1:], 2):
        section = f"{order}-grams"
        next_bits = highs_at = highs = 0
        if order < longest:
            prob, backoff = (prob_bits, backoff_bits) if prob_bits else (31, 32)
            next_bits = counts[order].bit_length()
            if model_type.has_arrays:
                if chopped is None:
                    fault.check_end(at + 2, section)
                    version, chopped = data[at : at + 2].tolist()
                    if version != _ARRAY_VERSION:
                        raise fault(
                            f"pointers have version {version}; expected {_ARRAY_VERSION}",
                            section,
                            at,
                        )
                high_bits = _high_bits(count + 1, counts[order], chopped)
                next_bits -= high_bits
                highs_at, highs = -(-at // 8) * 8 + 8, (counts[order] >> next_bits) + 1
                at += 8 * (1 + highs) + 7
        else:
            prob, backoff = prob_bits or 31, 0
        bits = word_bits + prob + backoff + next_bits
        probs_at, backoffs_at = codes[order]
        level = Level(
            order,
            count,
            at,
            count,
            bits,
            word_bits,
            prob,
            backoff,
            next_bits,
            highs_at,
            highs,
            probs_at,
            backoffs_at,
        )
        at += ((1 + count) * bits + 7) // 8 + 8
        fault.check_end(at, section)
        levels.append(level)
    return counts[0], hashes_at, hashes, unigrams_at, 16, tuple(levels), at


def _high_bits(entries: int, largest: int, most: int) -> int:
    """Returns how many high bits of a trie's pointers are kept in a table: the number, at most
    `most`, that makes the trie smallest."""
    required = largest.bit_length()

    def change(high: int) -> int:
        return (largest >> (required - high)) * 64 - entries * high

    return min(range(min(required, most) + 1), key=change)


class _Faults:
    def __init__(self, path: str, size: int) -> None:
        self._path, self._size = path, size

    def __call__(
        self,
        message: str,
        section: str,
        at: int | None = None,
        *,
        advice: str = DAMAGED,
    ) -> KenlmFormatError:
        return KenlmFormatError(
            message, path=self._path, section=section, byte_offset=at, advice=advice
        )

    def check_end(self, end: int, section: str) -> None:
        if end > self._size:
            raise self(
                f"the file has {self._size} bytes, but its header says that this section ends at "
                f"byte {end}",
                section,
            )


def _check_head(head: bytes, path: str) -> None:
    if head == REFERENCE:
        return
    fault = _Faults(path, len(head))
    build = "Rebuild the file from its ARPA file, with the current `build_binary`"
    if not is_kenlm(head):
        raise fault(
            f"the file is not one of KenLM's: it begins with {head[:24]!r}",
            "header",
            0,
            advice="Give a file that `build_binary` wrote, or an ARPA file",
        )
    if head.startswith(PREFIX + b"incomplete"):
        raise fault("KenLM did not finish building the file", "header", 0, advice=build)
    version = head[len(_VERSIONED) :].split(b"\n")[0]
    if head.startswith(_VERSIONED) and version.isdigit() and int(version) != _VERSION:
        raise fault(
            f"the file has format version {int(version)}; expected {_VERSION}",
            "header",
            0,
            advice=build,
        )
    if len(head) < len(REFERENCE):
        raise fault(f"the file ends after {len(head)} bytes, in its header", "header")
    swapped = struct.pack(">3f", 0.0, 1.0, -0.5)
    found = "from a machine with another byte order" if swapped in head else "not those of x86-64"
    raise fault(f"the test values in the header are {found}", "header", 56, advice=build)
