"""The kernels' parts against plain code; compiled, and as Python."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from dlm.estimate.counts import block


def tokens_of(r: random.Random, words: int, sentences: int) -> NDArray[np.uint32]:
    """Sentences from <s> to </s>."""
    out: list[int] = []
    for _ in range(sentences):
        out += [1, *(r.randrange(3, words) for _ in range(r.randint(0, 9))), 2]
    return np.array(out, np.uint32)


def plain_keys(tokens: NDArray[np.uint32], order: int) -> dict[tuple[int, ...], int]:
    """Keys and their counts."""
    found: Counter[tuple[int, ...]] = Counter()
    sentence: list[int] = []
    for token in tokens.tolist():
        if token == 1:
            sentence = [1] * order
        else:
            sentence.append(token)
            found[tuple(sentence[: -order - 1 : -1])] += 1
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    ("words", "bucket"),
    [(5, 1 << 6), (60, 1 << 10), (70_000, 1 << 6), (70_000, 1 << 10), (1 << 31, 1 << 6)],
)
@pytest.mark.parametrize("order", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_keys_of_a_block_are_sorted_and_counted(words: int, order: int, bucket: int) -> None:
    """Whatever the width of ids, and however small the parts that are sorted at once."""
    r = random.Random(words + order)
    some = min(words, 50) if words < 100 else words
    tokens = tokens_of(r, min(some, 5000) if words < 1 << 20 else 4000, 300)
    size = int(tokens.max()) + 1
    if words >= 1 << 20:
        tokens[tokens > 2] += np.uint32(words - 4001 - (words == 1 << 31) * ((1 << 31) - (1 << 23)))
        size = int(tokens.max()) + 1
    with ThreadPoolExecutor(2) as pool:
        parts = [*block.counted_keys(tokens, size, order, pool, 2, bucket)]
    rows = np.concatenate(parts)
    assert {tuple(row[:-1]): row[-1] for row in rows.tolist()} == plain_keys(tokens, order)
    assert rows[:, :-1].tolist() == [list(key) for key in plain_keys(tokens, order)]
