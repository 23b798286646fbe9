"""The view of a mapped file: the numbers that kernels read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.kenlm import kernels
from dlm.kenlm.layout import Data, Layout
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE


def make_view(data: Data, layout: Layout) -> NDArray[np.int64]:
    """The view of a file for `kernels.py`: (places,) int64. It does not keep `data` alive."""
    base = data.ctypes.data

    def address(at: int) -> int:
        return base + at if at else 0

    def share(size: int) -> int:
        """See `kernels.remainder`; its 64 bits as a signed number."""
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
    """Ids of words by their hashes, (n,) uint32; 0 where the model lacks one, as KenLM has it."""
    begin = np.zeros(len(words) + 1, np.int64)
    np.cumsum([len(word) for word in words], out=begin[1:])
    text = np.frombuffer(b"".join((*words, bytes(kernels.PAD_BYTES))), np.uint8)
    return find_in_text(view, text, begin)


def find_in_text(
    view: NDArray[np.int64], text: NDArray[np.uint8], begin: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """See `kernels.find_words`; its last argument."""
    ids = np.empty(len(begin) - 1, np.uint32)
    kernels.find_words(view.ctypes.data, text, begin, ids)
    return ids
