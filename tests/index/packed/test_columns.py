"""Packed columns give back what went in, in the fewest bits that their layout allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlm.index.coding import ValueHistogram
from dlm.index.packed import kernels
from dlm.index.packed.columns import (
    BACKOFF_BITS,
    PROB_BITS,
    decode_backoffs,
    decode_probs,
    magnitudes_of,
    probs_of,
    room,
)

few = settings(max_examples=60, deadline=None, derandomize=True)


@few
@given(width=st.integers(0, 57), count=st.integers(0, 200), seed=st.integers(0, 1 << 20))
def test_fields_of_any_width_come_back(width: int, count: int, seed: int) -> None:
    """Each in its own bits, with a spare word at the end that is 0."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << width, count, dtype=np.uint64)
    if count:
        values[rng.integers(count)] = (1 << width) - 1
    words, again = room(count * width), np.empty(count, np.uint64)
    kernels.put_all(words, 0, width, width, values)
    assert len(words) == (count * width + 63) // 64 + 1
    assert words[-1] == 0
    kernels.get_all(words.ctypes.data, 0, width, width, again)
    assert again.tolist() == values.tolist()
    whole = int.from_bytes(words.tobytes(), "little")
    assert whole == sum(int(value) << (i * width) for i, value in enumerate(values))


def as_bits(values: np.ndarray) -> list[int]:
    """What tells 0 from -0.0."""
    return np.asarray(values, np.float32).view(np.uint32).tolist()


PROBS = st.one_of(
    st.sampled_from([0.0, -np.inf, -99.0, -1.0, -1e-45, -3.4e38]),
    st.floats(-10, 0, width=32).map(lambda x: x + 0.0),
)
WEIGHTS = st.one_of(
    st.sampled_from([0.0, 0.5, -1e-45, 1e-45, 3e38, -3e38]),
    st.floats(-3, 3, width=32).map(lambda x: x + 0.0),
)


@few
@pytest.mark.parametrize("kind", [PROBS, WEIGHTS])
@given(data=st.data(), repeats=st.integers(1, 40), largest=st.sampled_from([0, 1, 4, 1 << 31]))
def test_values_come_back_by_table_and_above_a_base(
    kind: st.SearchStrategy[float], data: st.DataObject, repeats: int, largest: int
) -> None:
    """Probabilities, 0 and -inf among them, without their sign; weights with theirs."""
    values = data.draw(st.lists(kind, max_size=80))
    array = np.tile(np.array(values, np.float32), repeats)
    bits = magnitudes_of(array) if kind is PROBS else array.view(np.uint32)
    found = ValueHistogram(largest, np.uint32)
    for part in np.array_split(bits, 3):
        found.add(part)
    code = found.code(None if kind is PROBS else BACKOFF_BITS)
    codes = code.codes(bits)
    assert not len(array) or int(codes.max()).bit_length() <= code.bits
    assert len(code.table) <= largest
    if kind is PROBS:
        back = decode_probs(codes, code.base, probs_of(code.table))
        assert code.bits <= PROB_BITS
        assert len(code.table) or code.base == (int(bits.min()) if len(bits) else 0)
    else:
        back = decode_backoffs(codes, code.table.view(np.float32))
        assert (code.bits == BACKOFF_BITS) == (len(code.table) == 0)
    assert as_bits(back) == as_bits(array)
