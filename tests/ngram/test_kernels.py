"""The kernels' machine operations, numbers and rows, compiled and as plain Python."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numba import njit

from dlm.ngram import kernels
from dlm.ngram.arpa import ArpaReader, kernels as row_kernels
from dlm.ngram.arpa.rows import RowFault, float32_of
from dlm.ngram.wordtable import PADDING, WordTable
from ngram.conftest import OPERATIONS, fold


@njit
def compiled_number(text):  # type: ignore[no-untyped-def]
    """`read_number` of an array."""
    return row_kernels.read_number(kernels.raw(text), 0)


@njit
def compiled_operations(text, a, b):  # type: ignore[no-untyped-def]
    """Every machine operation once."""
    place = kernels.raw(text)
    kernels.prefetch(place, np.uint64(0))
    return (
        kernels.load64(place, 3),
        kernels.fold(a, b),
        kernels.trailing_zeros(np.int64(a | np.uint64(1) << np.uint64(63))),
        kernels.bits_of(np.float64(a)),
    )


def number_of(text: bytes, how: str) -> tuple[bool, Any, int]:
    """(whether it is sure, the number, what was read) of a number before a space."""
    chars = np.frombuffer(text + b" " + PADDING, np.uint8)
    if how == "compiled":
        return compiled_number(chars)  # type: ignore[no-any-return]
    return row_kernels.read_number(chars, 0)  # type: ignore[no-any-return]


def test_machine_operations_agree_with_their_plain_form() -> None:
    """Python's integers are the oracle of what the processor does."""
    rng = random.Random(1)
    for _ in range(300):
        text = np.frombuffer(rng.randbytes(16), np.uint8)
        a, b = (np.uint64(rng.getrandbits(64) >> rng.randrange(64)) for _ in range(2))
        got = compiled_operations(text, a, b)
        assert got == (
            int(OPERATIONS["load64"](text, 3)),
            int(fold(a, b)),
            int(OPERATIONS["trailing_zeros"](a | np.uint64(1 << 63))),
            int(OPERATIONS["bits_of"](a)),
        )


NUMBER = st.from_regex(rb"[+-]?([0-9]{0,24}\.?[0-9]{0,24})([eE][+-]?[0-9]{0,3})?", fullmatch=True)
ODD = st.sampled_from(
    [b"-inf", b"-INF", b"inf", b"+inf", b"-info", b"nan", b"", b"-", b".", b"-.", b"1e", b"-e5",
     b"0x1", b"1_0", b"1.2.3", b"--1", b"-0", b"-0.0e9", b"1\xb2", b"-16777217", b"1e99999999999",
     b"-1e-45", b"1.17549435e-38", b"1.17549421e-38", b"3.4028235e38", b"3.4028236e38", b"1e39",
     b"0." + b"0" * 40 + b"1", b"9" * 20, b"-1.00000005960464477539062500000000001"]
)  # fmt: skip


def agree(text: bytes, how: str) -> bool:
    """Whether a number is read as the careful way reads it; says whether it is sure."""
    sure, value, end = number_of(text, how)
    try:
        expected = np.float32(float32_of(text, "number"))
    except RowFault:
        # Other bytes after a number are for the caller to see.
        assert not sure or end < len(text)
        return False
    if sure:
        assert end == len(text)
        assert np.float32(value).tobytes() == expected.tobytes()
        assert not np.signbit(value) or value != 0
    return bool(sure)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=NUMBER | ODD)
def test_number_that_is_sure_is_the_nearest_float32(text: bytes) -> None:
    """Any text that could be a number, compared with exact reading."""
    agree(text, "compiled")


@pytest.mark.usefixtures("plain")
def test_numbers_as_plain_python() -> None:
    """The source itself is right, apart from what the compiler makes of it."""
    rng = random.Random(4)
    for _ in range(400):
        digits = "".join(rng.choices("0123456789", k=rng.randint(0, 22)))
        exponent = rng.choice(["", f"e{rng.randint(-60, 50)}"])
        agree(f"-{rng.randint(0, 99)}.{digits}{exponent}".encode(), "plain")
    for text in (b"-inf", b"-0", b"1e", b"", b"-16777217", b"0.00000000000000000000000001"):
        agree(text, "plain")


MODEL = b"""\\data\\
ngram 1=6
ngram 2=4

\\1-grams:
-1.5\t<UNK>
-99\t<s>\t-0.25
-inf\t</s>\t0
-0.75\ta\t-0.5
-1.25\tsesquipedalian\t+1.5e-1
-1.0000000000000000000000000001\tfloccinaucinihilipilification

\\2-grams:
-0.5\t<s> a\t0\r
-0.5 a\tsesquipedalian
-0.5\t\tfloccinaucinihilipilification </s> \t0
-16777217\ta <unk>

\\end\\
"""


@pytest.mark.usefixtures("plain")
@pytest.mark.filterwarnings("ignore:overflow encountered in scalar")  # in another thread
def test_rows_as_plain_python() -> None:
    """A file is read the same by the source of the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.arpa"
        path.write_bytes(MODEL)
        with ArpaReader(path) as reader:
            one, two = list(reader.batches())
    assert reader.vocabulary.words == [
        b"<UNK>", b"<s>", b"</s>", b"a", b"sesquipedalian", b"floccinaucinihilipilification"
    ]  # fmt: skip
    assert one.ids.tolist() == [[0], [1], [2], [3], [4], [5]]
    assert one.log10_prob.tolist() == [-1.5, -99, -np.inf, -0.75, -1.25, -1]
    assert two.ids.tolist() == [[1, 3], [3, 4], [5, 2], [3, 0]]
    assert two.log10_prob.tolist() == [-0.5, -0.5, -0.5, -16777216]


@pytest.mark.usefixtures("plain")
def test_tables_as_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are found exactly though all of them have one hash."""
    monkeypatch.setattr(kernels, "hash_word", lambda *_: np.uint64(0xFFFF_FFFF_FFFF_FFFF))
    words = [b"<unk>", b"a", b"a\0", b"12345678", b"123456789", b"12345678x", b"", b"x" * 300]
    words += [b"x" * 299, b"x" * 299 + b"y", *(b"w%d" % i for i in range(60))]
    table = WordTable(words)
    assert table.ids_of(words).tolist() == list(range(len(words)))
    assert table.ids_of([b"b", b"x" * 301, b"<UNK>", b"a\0\0"]).tolist() == [0, 0, 0, 0]
    assert table.words() == words
    ids, begin = table.ids_of_text(b"a 12345678x\n\nw59\tno")
    assert ids.tolist() == [1, 5, len(words) - 1, 0]
    assert begin.tolist() == [0, 2, 2, 4]
    with pytest.raises(ValueError, match="twice"):
        WordTable([b"<unk>", b"a", b"a"])
