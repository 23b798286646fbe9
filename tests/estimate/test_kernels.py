"""The kernels' parts against plain code; compiled, and as Python."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dlm.estimate.arpa import kernels as arpa_kernels
from dlm.estimate.counts import block, runs


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


@pytest.mark.parametrize("words", [5, 60, 70_000, 1 << 22, 1 << 31])
@pytest.mark.parametrize("order", [1, 3, 5, 8])
@pytest.mark.parametrize("bucket", [1 << 10, 1 << 6])
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


@pytest.mark.parametrize("memory_bytes", [1, 1 << 14, 1 << 20])
def test_runs_are_merged_as_one(tmp_path: Path, memory_bytes: int) -> None:
    """Through several passes where memory allows few at once; equal keys are added up."""
    r = random.Random(memory_bytes)
    total: Counter[tuple[int, ...]] = Counter()
    found = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(7):
            tokens = tokens_of(r, 12, 200)
            run = runs.Run(tmp_path, 3)
            for rows in block.counted_keys(tokens, 12, 3, pool, 2, 1 << 10):
                run.append(rows)
                for row in rows.tolist():
                    total[tuple(row[:-1])] += row[-1]
            found.append(run)
    found = runs.few_enough(found, memory_bytes, tmp_path)
    merged: Counter[tuple[int, ...]] = Counter()
    order: list[tuple[int, ...]] = []
    for rows in runs.merged(found, memory_bytes):
        for row in rows.tolist():
            merged[tuple(row[:-1])] += row[-1]
            order.append(tuple(row[:-1]))
    assert merged == total
    assert order == sorted(order)
    assert not [*tmp_path.iterdir()]


def numbers() -> Iterator[float]:
    """Of the sizes that models have, and at the edges of float32."""
    r = np.random.default_rng(5)
    yield from (-r.random(20_000) * 9).tolist()
    yield from (-(10.0 ** (-r.random(5_000) * 8))).tolist()
    yield from r.integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32).tolist()
    for k in range(-149, 128):
        yield 2.0**k
        yield -float(np.nextafter(np.float32(2.0**k), np.float32(0)))
    for k in range(-45, 39):
        yield float(f"1e{k}")
    yield from (0.0, -0.0, -99.0, -1.5, 9.999999, 99999.995, 1e-40, 3.4028235e38)


def test_numbers_read_back_and_have_few_digits() -> None:
    """Every float32 comes back to the bit; few digits are spent beyond the shortest."""
    values = np.array([*numbers()], np.float64).astype(np.float32)
    values = values[np.isfinite(values)]
    ids = np.zeros((len(values), 1), np.uint32)
    out = np.empty(len(values) * 40, np.uint8)
    done, used = arpa_kernels.put_rows(
        ids, values, np.empty(0, np.float32), np.empty(0, np.uint32), 0,
        np.array([0, 1], np.int64), np.frombuffer(b"w" + bytes(8), np.uint8), out,
    )  # fmt: skip
    assert done == len(values)
    texts = [line.split(b"\t")[0].decode() for line in out[:used].tobytes().splitlines()]
    assert len(texts) == len(values)
    back = np.array([np.float32(text) for text in texts])
    np.testing.assert_array_equal(back, values)
    more = 0
    for text, value in zip(texts, values, strict=True):
        digits = text.lstrip("-").split("e")[0].replace(".", "").strip("0")
        shortest = np.format_float_scientific(value, unique=True, trim="-").lstrip("-")
        least = len(shortest.split("e")[0].replace(".", "").strip("0"))
        if 1e-8 < abs(value) < 1e6:
            # A text halfway to the next float32 is not trusted to be rounded the right way.
            assert len(digits) <= max(least, 1) + 1
            more += len(digits) > max(least, 1)
    assert more < len(texts) // 100
