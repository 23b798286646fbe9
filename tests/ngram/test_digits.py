"""Numbers as text: the fewest digits that read back, as another writer of them has it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from numba import njit
from numpy.typing import NDArray

from dlm.ngram import digit_kernels as kernels
from dlm.ngram.arpa import kernels as row_kernels
from dlm.ngram.arpa.writer import RowColumns, WordBytes, rows_text
from dlm.ngram.wordtable import PADDING, WordTable

EDGES = np.array(
    [0, -0.0, 1, -1, 0.1, 1e-6, 1e-7, 1.25e-7, 9999999, 1e9, 1e10, 1.5e10, -99, 2**24, 2**25,
     np.inf, -np.inf, 3.4028235e38, 1.1754944e-38, 1e-45, -1e-45, 9.999999e-7, 33554434],
    np.float32,
)  # fmt: skip


@njit
def compiled_digits(bits):  # type: ignore[no-untyped-def]
    """`shortest_digits` of one number."""
    return kernels.shortest_digits(bits)


def texts(numbers: NDArray[np.float32]) -> list[str]:
    """What the kernel writes of each, in a room of just so many bytes."""
    out = []
    for number in numbers:
        text = np.zeros(kernels.NUMBER_BYTES, np.uint8)
        end = int(kernels.put_number(text, 0, number))
        assert not text[end:].any()
        out.append(text[:end].tobytes().decode())
    return out


def of_arrow(numbers: NDArray[np.float32]) -> list[str]:
    """Arrow's texts, which are the shortest too."""
    return list(pc.cast(pa.array(numbers + np.float32(0)), pa.string()).to_pylist())


def from_bits(bits: NDArray[np.integer]) -> NDArray[np.float32]:
    """The numbers that have these bits, without NaN."""
    numbers = bits.astype(np.uint32).view(np.float32)
    return numbers[~np.isnan(numbers)]


def rows_of(numbers: NDArray[np.float32]) -> bytes:
    """Numbers as the probabilities of rows of the word `w`."""
    ids = np.zeros((len(numbers), 1), np.uint32)
    begin, word = np.array([0, 1], np.int64), np.frombuffer(b"w" + PADDING, np.uint8)
    words = WordBytes(begin, word, 1)
    return b"".join(rows_text(words, RowColumns(ids, numbers, None)))


def test_edges_are_written_as_arrow_writes_them() -> None:
    """Signs, infinities, powers, and where exponents begin."""
    assert texts(EDGES) == of_arrow(EDGES)
    assert texts(EDGES)[:8] == ["0", "0", "1", "-1", "0.1", "0.000001", "1e-7", "1.25e-7"]


POWERS = np.arange(0, 255, dtype=np.uint32) << np.uint32(23)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("powers of two", POWERS),
        ("just above them", POWERS + np.uint32(1)),
        ("just below them", POWERS[1:] - np.uint32(1)),
        ("subnormal", np.arange(1, 1 << 17, dtype=np.uint32)),
        ("any", np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint64)),
        ("of models", np.random.default_rng(1).integers(0xB8000000, 0xC2D00000, 1 << 20)),
        ("every one from 1 on", 0x3F800000 + np.arange(1 << 18)),
    ],
)
def test_numbers_are_written_as_arrow_writes_them(name: str, bits: NDArray[np.integer]) -> None:
    """Over a million of each kind where there are so many."""
    numbers = from_bits(bits)
    want = "\tw\n".join([*of_arrow(numbers), ""])
    assert rows_of(numbers).decode() == want


def test_the_kernel_is_what_its_python_says() -> None:
    """Compiled and plain agree on digits."""
    rng = np.random.default_rng(3)
    bits = rng.integers(1, 0x7F800000, 300, dtype=np.uint64).astype(np.uint32)
    with np.errstate(over="ignore"):
        for bit in bits:
            digits, tens = compiled_digits(bit)
            assert np.float32(f"{int(digits)}e{int(tens)}").view(np.uint32) == bit


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("room", [133, 200, 4096])
def test_rows_are_written_as_far_as_there_is_room(request, python: bool, room: int) -> None:
    """In as many pieces as it takes, without those that are left out; nothing beyond the room."""
    if python:
        request.getfixturevalue("plain")
    rng = np.random.default_rng(6)
    table = WordTable([b"<unk>", b"a", b"eightbyt", b"ninebytes", b"x" * 40])
    ids = rng.integers(0, 5, (60, 2), dtype=np.uint32)
    prob, weight = (-rng.random((2, 60))).astype(np.float32)
    marks = rng.integers(0, 2, 60, dtype=np.uint32) * row_kernels.LEFT_OUT
    words = [table.word_bytes[b:e].tobytes() for b, e in pairwise(table.word_begin.tolist())]
    want = [
        b"%s\t%s\t%s\n" % (p.encode(), b" ".join(words[i] for i in row), w.encode())
        for p, row, w, mark in zip(texts(prob), ids, texts(weight), marks, strict=True)
        if not mark
    ]
    done, pieces = 0, []
    while done < len(ids):
        text = np.full(room + 8, 7, np.uint8)
        before = done
        done, end = row_kernels.put_rows(
            ids, prob, weight, marks, done, table.word_begin, table.word_bytes, text[:room]
        )
        assert done > before
        assert (text[room:] == 7).all()
        pieces.append(text[:end].tobytes())
    assert b"".join(pieces) == b"".join(want)
    assert len(pieces) > 1 or room == 4096


def fixed(numbers: NDArray[np.float64]) -> list[str]:
    """What the kernel writes of each, in a room of just so many bytes."""
    out = []
    for number in numbers:
        text = np.zeros(kernels.FIXED_BYTES, np.uint8)
        end = int(kernels.put_fixed(text, 0, number))
        assert not text[end:].any()
        out.append(text[:end].tobytes().decode())
    return out


def test_six_decimals_are_those_of_python() -> None:
    """Rounded from the exact value, halves to even, at every size; -0 keeps its sign."""
    rng = np.random.default_rng(5)
    sums = rng.normal(0, 1, (4000, 8)).astype(np.float32).astype(np.float64).sum(axis=1)
    any_size = rng.normal(0, 1, 4000) * 10.0 ** rng.integers(-30, 15, 4000)
    # Halves of the last decimal that binary can hold, and their neighbours.
    halves = np.arange(-2000, 2000) * 5**6 / 2.0**7 * 0.5**6 / 5**6 + rng.integers(0, 9, 4000)
    halves = np.concatenate([halves, np.arange(1, 4000, 2) / 2.0**7])
    edges = [0.0, -0.0, 1.0, 0.9999995, 0.99999949999, 9.9999995, -57.21295, 2.0**53 - 1, 5e-324,
             0.5e-6, 1.5e-6, 2.5e-6, 0.00048749999, 1e-7, 123456789.5]  # fmt: skip
    near = (rng.integers(0, 500, 4000) + 0.5) * 1e-6
    numbers = np.concatenate(
        [
            near,
            np.nextafter(near, 0),
            np.nextafter(near, 1),
            sums,
            any_size,
            halves,
            np.nextafter(halves, 1e9),
            edges,
        ]
    )
    numbers = numbers[np.abs(numbers) < kernels.FIXED_LIMIT]
    assert fixed(numbers) == [f"{x:.6f}" for x in numbers.tolist()]


def test_counts_are_whole_numbers() -> None:
    """From no digit too many to the largest."""
    for number in [0, 9, 10, 99, 100, 2**31, 10**18, 2**63 - 1, *(10**k - 1 for k in range(1, 19))]:
        text = np.zeros(kernels.COUNT_BYTES, np.uint8)
        end = int(kernels.put_count(text, 0, number))
        assert text[:end].tobytes().decode() == str(number)
