"""Sums over the arrays of a message that may be anything."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def totals(context_lengths, word_counts):  # type: ignore[no-untyped-def]
    """Words of all contexts, words asked of them, and whether a context asks nothing.

    Shapes   (C,) uint8, (C,) uint32
    Returns  int64, int64, bool; fewer than 2^31 contexts cannot reach 2^63, so that hostile counts
             never wrap around to the right total
    """
    contexts = np.int64(0)
    words = np.int64(0)
    silent = False
    for i in range(len(context_lengths)):
        contexts += np.int64(context_lengths[i])
        words += np.int64(word_counts[i])
        silent |= word_counts[i] == 0
    return contexts, words, silent
