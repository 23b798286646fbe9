"""Packing loses no target, adds none, and refuses ids of another vocabulary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlm.errors import ConfigError
from dlm.federated import tokens

TEXT = st.lists(st.lists(st.integers(3, 50), max_size=25), min_size=1, max_size=8)


def arrays(text: list[list[int]]) -> list[tokens.Ids]:
    """As an encoder gives them."""
    return [np.asarray(ids, np.int32) for ids in text]


@settings(deadline=None, derandomize=True)
@given(TEXT, st.integers(1, 5), st.integers(1, 9))
def test_every_token_is_a_target_once_and_follows_the_token_before_it(
    text: list[list[int]], batch_size: int, unroll: int
) -> None:
    """Utterances: the pairs (input, target) are those of the marked utterances."""
    if not any(text):
        return
    packed = tokens.pack(arrays(text), batch_size=batch_size, unroll=unroll, packing="utterances")
    rows = packed.reshape(-1, unroll + 1)
    pairs = [(int(a), int(b)) for row in rows for a, b in itertools.pairwise(row) if b >= 0]
    expected = [
        pair
        for ids in text
        if ids
        for pair in zip([tokens.BOS_ID, *ids], [*ids, tokens.EOS_ID], strict=True)
    ]
    assert pairs == expected
    assert tokens.target_count(packed) == len(expected)
    assert packed.shape[1:] == (batch_size, unroll + 1)


@settings(deadline=None, derandomize=True)
@given(TEXT, st.integers(1, 5), st.integers(1, 9))
def test_a_stream_keeps_every_pair_and_its_order_within_a_row(
    text: list[list[int]], batch_size: int, unroll: int
) -> None:
    """Stream: read row after row, batch after batch, it is the joined text."""
    if not any(text):
        return
    packed = tokens.pack(arrays(text), batch_size=batch_size, unroll=unroll, packing="stream")
    stream = [t for ids in text if ids for t in [tokens.BOS_ID, *ids, tokens.EOS_ID]]
    pairs = [
        (int(a), int(b))
        for row in range(batch_size)
        for batch in packed
        for a, b in itertools.pairwise(batch[row])
        if b >= 0
    ]
    assert pairs == list(itertools.pairwise(stream))


def test_the_order_is_drawn_and_the_text_stays_the_same() -> None:
    """Two draws differ; both hold the same rows."""
    text = arrays([[3 + i] * 4 for i in range(20)])
    packed = [
        tokens.pack(
            text,
            batch_size=4,
            unroll=6,
            packing="utterances",
            shuffle=np.random.default_rng(seed),
        )
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(packed[0], packed[1])
    assert not np.array_equal(packed[0], packed[2])
    rows = [sorted(map(tuple, p.reshape(-1, 7).tolist())) for p in packed]
    assert rows[0] == rows[2]


def test_a_limit_of_batches_holds() -> None:
    """The rest waits."""
    text = arrays([[3] * 100])
    packed = tokens.pack(text, batch_size=2, unroll=5, packing="utterances", max_batches=3)
    assert packed.shape == (3, 2, 6)


def test_a_user_without_text_is_refused() -> None:
    """An empty list, and one of empty utterances."""
    texts: list[list[list[int]]] = [[], [[]], [[], []]]
    for text in texts:
        with pytest.raises(ConfigError, match="without any text"):
            tokens.pack(arrays(text), batch_size=2, unroll=3, packing="stream")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 10], "id 10.*ids 0 to 9"),
        ([-1, 3], "id -1"),
        ([3, 1], "id 1 or 2"),
        ([2], "id 1 or 2"),
    ],
)
def test_ids_of_another_vocabulary_are_refused(ids: list[int], message: str) -> None:
    """Never a silent wrong row of the embedding."""
    tokens.check_ids(arrays([[3, 0, 9], []]), 10)
    with pytest.raises(ConfigError, match=message):
        tokens.check_ids(arrays([ids]), 10)
