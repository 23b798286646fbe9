"""Makes the view of a mapped file (the numbers that kernels read), and finds the words by id: in
the file or, if a list is given, in the list, whose words are hashed to find their ids."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, FormatError, KenlmFormatError
from dlm.kenlm import kernels
from dlm.kenlm.layout import DAMAGED, Data, Layout
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, UNK_SPELLINGS
from dlm.ngram.wordtable import WordTable

_SHOWN = 3  # number of missing ids that a message shows


def make_view(data: Data, layout: Layout) -> NDArray[np.int64]:
    """Makes the view of a file for `kernels.py`, (places,) int64. It does not keep `data` alive."""
    base = data.ctypes.data

    def address(at: int) -> int:
        return base + at if at else 0

    def share(size: int) -> int:
        """Returns the `share` for `kernels.remainder`: its 64 bits as a signed number."""
        found = min((1 << 64) // max(size, 1), (1 << 64) - 1)
        return found - (1 << 64) if found >> 63 else found

    counts = [level.count for level in layout.levels[1:]] + [0]
    view = np.zeros(kernels.LEVELS + kernels.LEVEL_PLACES * len(layout.levels), np.int64)
    view[: kernels.BEGIN] = (
        layout.model_type.is_trie,
        layout.order,
        layout.words,
        address(layout.hashes_at),
        layout.hashes,
        share(layout.hashes),
        address(layout.unigrams_at),
        layout.unigram_bytes,
    )
    rows = view[kernels.LEVELS :].reshape(-1, kernels.LEVEL_PLACES)
    for row, level, children in zip(rows, layout.levels, counts, strict=True):
        row[:] = (
            address(level.at),
            level.entries,
            share(level.entries),
            level.entry_size,
            level.word_bits,
            level.prob_bits,
            level.backoff_bits,
            level.next_bits,
            address(level.highs_at),
            level.highs,
            address(level.probs_at),
            address(level.backoffs_at),
            children,
        )
    view[[kernels.BEGIN, kernels.END]] = find_ids(view, [BEGIN_SENTENCE, END_SENTENCE])
    return view


def find_ids(view: NDArray[np.int64], words: list[bytes]) -> NDArray[np.uint32]:
    """Finds ids by the words' hashes, (n,) uint32; 0 if the model lacks a word, as in KenLM."""
    begin = np.zeros(len(words) + 1, np.int64)
    np.cumsum([len(word) for word in words], out=begin[1:])
    text = np.frombuffer(b"".join((*words, bytes(kernels.PAD_BYTES))), np.uint8)
    return find_in_text(view, text, begin)


def find_in_text(
    view: NDArray[np.int64], text: NDArray[np.uint8], begin: NDArray[np.int64]
) -> NDArray[np.uint32]:
    ids = np.empty(len(begin) - 1, np.uint32)
    kernels.find_words(view.ctypes.data, text, begin, ids)
    return ids


def words_of(
    data: Data,
    layout: Layout,
    view: NDArray[np.int64],
    vocab: str | os.PathLike[str] | None = None,
) -> WordTable:
    """Returns the words of a file by id; the id of `<unk>` is 0.

    Args    vocab  path of a list, one word per line, for a file without words (`build_binary -v`).
                   Words that the model lacks are skipped. None: the words that the file stores
    Raises  ConfigError       the file stores no words, and there is no list
            KenlmFormatError  stored words do not match the file's hashes, or a word occurs twice
            FormatError       the list lacks words of the model, or two lines have the same hash
            OSError           the list cannot be read
    """
    if vocab is not None:
        return _listed(layout, view, Path(vocab))
    if layout.words_at is None:
        raise ConfigError(
            f"{layout.path} stores no words (it was built with `build_binary -v`), but this "
            "command needs them. Pass a file of its words, one per line (vocab=FILE; `dlm export "
            "--vocab FILE`)"
        )
    return _stored(data, layout, view, layout.words_at)


def _stored(data: Data, layout: Layout, view: NDArray[np.int64], at: int) -> WordTable:
    text = data[at:]
    ends = np.flatnonzero(text == 0)
    if len(ends) != layout.words or ends[-1] != len(text) - 1:
        raise KenlmFormatError(
            f"the file stores {len(ends)} words; expected {layout.words}",
            path=layout.path,
            section="words",
            byte_offset=at,
            advice=DAMAGED,
        )
    begin = np.concatenate((np.zeros(1, np.int64), ends - np.arange(len(ends))))
    joined = np.concatenate((text[text != 0], np.zeros(kernels.PAD_BYTES, np.uint8)))
    ids = find_in_text(view, joined, begin)
    wrong = np.flatnonzero(ids != np.arange(len(ids), dtype=np.uint32))
    if len(wrong):
        i = int(wrong[0])
        word = joined[begin[i] : begin[i + 1]].tobytes()
        raise KenlmFormatError(
            f"word {i} is {word!r}, but its hash is that of word {ids[i]}",
            path=layout.path,
            section="words",
            byte_offset=at + int(begin[i]) + i,
            advice=DAMAGED,
        )
    return WordTable.from_arrays(joined[: begin[-1]], begin)


def _listed(layout: Layout, view: NDArray[np.int64], path: Path) -> WordTable:
    lines = [line.removesuffix(b"\r") for line in path.read_bytes().split(b"\n")]
    ids = find_ids(view, lines)
    found: list[bytes | None] = [None] * layout.words
    found[0] = UNK_SPELLINGS[0]
    for number, (word, i) in enumerate(zip(lines, ids.tolist(), strict=True), 1):
        if not i:
            continue
        if found[i] is not None:
            raise FormatError(
                f"{path}, line {number}: {word!r} has the same hash as the line {found[i]!r}; "
                f"expected each word of {layout.path} once. Remove one of the two lines"
            )
        found[i] = word
    missing = [i for i, word in enumerate(found) if word is None]
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
        raise FormatError(
            f"{path} lacks {len(missing)} of the {layout.words} words of {layout.path} (ids "
            f"{shown}). Pass the list of words that the model was built with"
        )
    return WordTable([word for word in found if word is not None])
