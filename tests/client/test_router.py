"""Grouping, routing, splitting and merging, against plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from dlm.client import kernels, router
from dlm.ngram.partition import SLOTS, slots_of
from dlm.ngram.query import QueryGroups
from server.calls import pack

Query = tuple[tuple[int, ...], int]  # a context, most recent word last, and a word
Plain = list[tuple[tuple[int, ...], list[int]]]  # contexts and what is asked of each

quick = settings(max_examples=60, deadline=None, derandomize=True)
# Few ids, so that contexts and queries repeat; and now and then the largest there is.
ids = st.integers(0, 3) | st.just(0xFFFFFFFF)
rows_of = st.integers(1, 4).flatmap(
    lambda width: st.tuples(
        st.just(width),
        st.lists(
            st.tuples(st.lists(ids, max_size=width).map(tuple), st.lists(ids, max_size=4)),
            max_size=20,
        ),
    )
)


def arrays(
    width: int, rows: Plain
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]:
    """Contexts and what is asked of each, as `group` takes them; unused columns hold what must
    not be looked at."""
    contexts = np.full((len(rows), width), 77, np.uint32)
    for row, (context, _) in enumerate(rows):
        if context:
            contexts[row, width - len(context) :] = context
    return (
        contexts,
        np.array([len(c) for c, _ in rows], np.uint8),
        np.array([len(words) for _, words in rows], np.uint32),
        np.array([w for _, words in rows for w in words], np.uint32),
    )


def each(rows: Plain) -> list[Query]:
    """The queries of the rows, in order."""
    return [(context, word) for context, words in rows for word in words]


def plain(groups: QueryGroups) -> Plain:
    """The groups as Python objects."""
    contexts, words = iter(groups.context_words.tolist()), iter(groups.words.tolist())
    out = [
        (tuple(next(contexts) for _ in range(length)), [next(words) for _ in range(count)])
        for length, count in zip(
            groups.context_lengths.tolist(), groups.word_counts.tolist(), strict=True
        )
    ]
    assert next(contexts, None) is None and next(words, None) is None
    return out


def flat(groups: QueryGroups) -> list[Query]:
    """The queries of the groups, in order."""
    return [(context, word) for context, words in plain(groups) for word in words]


def grouped_plainly(queries: list[Query]) -> Plain:
    """What `group` must give: contexts, and words within them, by first appearance."""
    found: dict[tuple[int, ...], dict[int, None]] = {}
    for context, word in queries:
        found.setdefault(context, {})[word] = None
    return [(context, list(words)) for context, words in found.items()]


@quick
@given(rows_of)
def test_grouping_asks_each_query_once_in_the_order_of_first_appearance(case) -> None:
    """Groups equal the dictionary's; `place` leads each query back to itself."""
    width, rows = case
    *found, place = kernels.group_queries(*arrays(width, rows))
    groups = QueryGroups(*found)
    assert plain(groups) == grouped_plainly(each(rows))
    asked = flat(groups)
    assert len(set(asked)) == len(asked)
    assert [asked[at] for at in place.tolist()] == each(rows)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows_of)
def test_the_kernel_and_its_python_function_agree(case) -> None:
    """The compiled form and `py_func` return the same arrays, dtypes included."""
    with np.errstate(over="ignore"):
        slow = kernels.group_queries.py_func(*arrays(*case))
    for fast, plainly in zip(kernels.group_queries(*arrays(*case)), slow, strict=True):
        assert fast.dtype == plainly.dtype
        assert fast.tolist() == plainly.tolist()


def test_grouping_many_queries_fills_the_tables_without_loss() -> None:
    """50,000 random queries: every place leads back, and nothing is asked twice."""
    rng = np.random.default_rng(5)
    contexts = rng.integers(0, 30, (50_000, 3), dtype=np.uint32)
    lengths = rng.integers(0, 4, 50_000).astype(np.uint8)
    words = rng.integers(0, 20, 50_000, dtype=np.uint32)
    *found, place = kernels.group_queries(contexts, lengths, np.ones(50_000, np.uint32), words)
    groups = QueryGroups(*found)
    asked = flat(groups)
    assert len(set(asked)) == len(asked)
    queries = [
        (tuple(c[3 - n :]), w)
        for c, n, w in zip(contexts.tolist(), lengths.tolist(), words.tolist(), strict=True)
    ]
    assert set(asked) == set(queries)
    assert [asked[at] for at in place.tolist()] == queries


groups_of = st.lists(
    st.tuples(st.lists(ids, max_size=4).map(tuple), st.lists(ids, min_size=1, max_size=6)),
    max_size=12,
)


@quick
@given(
    st.lists(
        st.tuples(
            st.lists(ids, min_size=2, max_size=4).map(tuple),
            st.lists(ids, min_size=1, max_size=6),
            st.booleans(),
        ),
        max_size=15,
    ),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_routing_sends_each_remote_query_once_to_the_owner_of_its_context(
    groups, shards: int, max_queries: int
) -> None:
    """Pieces hold contexts of their shard alone, no more queries than allowed, and all of them."""
    slots = np.random.default_rng(shards).integers(0, shards, SLOTS).astype(np.uint16)
    whole = pack([(c, w) for c, w, _ in groups])
    remote = np.array([r for _, _, r in groups], np.uint8)
    g = whole
    arrays_of = (g.context_lengths, g.context_words, g.pairs, g.word_counts, g.words)
    routed = kernels.route_groups(*arrays_of, remote, slots, shards)
    pieces = router.pieces_of(routed, max_queries)
    if remote.all():
        again = router.route(whole, slots, shards, max_queries)
        assert [p.at.tolist() for p in again] == [p.at.tolist() for p in pieces]
    everything = flat(whole)
    seen: list[int] = []
    for piece in pieces:
        assert 0 < len(piece.groups.words) <= max_queries
        for context, words in plain(piece.groups):
            u, v = np.array([context[-2]], np.uint32), np.array([context[-1]], np.uint32)
            assert slots[slots_of(u, v)[0]] == piece.shard
            assert words
        assert [everything[at] for at in piece.at.tolist()] == flat(piece.groups)
        seen += piece.at.tolist()
    wanted = np.flatnonzero(np.repeat(remote.astype(bool), whole.word_counts)).tolist()
    assert sorted(seen) == wanted
    # No more messages than needed.
    for shard in {p.shard for p in pieces}:
        sizes = [len(p.groups.words) for p in pieces if p.shard == shard]
        assert all(size == max_queries for size in sizes[:-1])


@quick
@given(groups_of, st.integers(1, 10))
def test_splitting_keeps_order_and_fills_every_message_but_the_last(groups, limit: int) -> None:
    """The parts, joined, are the whole; each context stands with each of its parts."""
    whole = pack(groups)
    parts = list(router.split(whole, limit))
    assert [q for part, _, _ in parts for q in flat(part)] == flat(whole)
    total = len(whole.words)
    assert [(b, e) for _, b, e in parts] == [
        (b, min(b + limit, total)) for b in range(0, total, limit)
    ] or (total == 0 and len(parts) == 1)
    for part, begin, end in parts:
        assert len(part.words) == end - begin <= limit
        assert all(words for _, words in plain(part))
        assert part.word_counts.dtype == np.uint32


@quick
@given(st.lists(groups_of, min_size=1, max_size=5))
def test_gathering_asks_shared_queries_once_and_places_every_answer(parts) -> None:
    """Several calls as one message; places run over the parts, one after another. Where no two
    contexts are the same, all stand as they stood."""
    # As calls have them: no context stands in one twice.
    parts = [grouped_plainly([(c, w) for c, words in part for w in words]) for part in parts]
    groups, place = router.gather([pack(part) for part in parts])
    asked = flat(groups)
    everything = [q for part in parts for q in flat(pack(part))]
    contexts = [context for part in parts for context, _ in part]
    shared = len(set(contexts)) < len(contexts)
    assert (place is not None) == shared
    if place is None:
        assert asked == everything
    else:
        assert [asked[at] for at in place.tolist()] == everything
        assert plain(groups) == grouped_plainly(everything)
    assert groups.word_counts.dtype == np.uint32
    # As of a message that is too long for the GIL.
    everywhere = [pack(part) for part in parts]
    names = ("context_lengths", "context_words", "pairs", "word_counts", "words")
    joined = [np.concatenate([getattr(part, name) for part in everywhere]) for name in names]
    found, *large, place_of = kernels.regroup_large(*joined)
    assert found == shared
    if place is not None:
        assert flat(QueryGroups(*large)) == asked and place_of.tolist() == place.tolist()


@quick
@given(rows_of, st.integers(1, 4), st.randoms(use_true_random=False))
def test_finishing_gives_each_query_its_own_answer(case, shards, rng) -> None:
    """Of low orders, of shards, and repeats alike: against a dictionary."""
    width, rows = case
    *found, place = kernels.group_queries(*arrays(width, rows))
    groups = QueryGroups(*found)
    asked = flat(groups)
    remote = np.array([len(c) >= 2 and rng.random() < 0.7 for c, _ in plain(groups)], np.uint8)
    pairs = np.zeros(len(remote), np.uint32)
    slots = np.random.default_rng(shards).integers(0, shards, SLOTS).astype(np.uint16)
    g = groups
    arrays_of = (g.context_lengths, g.context_words, pairs, g.word_counts, g.words)
    at = kernels.route_groups(*arrays_of, remote, slots, shards)[-1]
    truth = {query: number for number, query in enumerate(asked)}
    known = np.array([truth[query] for query in asked], np.float32)
    rest = np.stack([(3 + known % 7).astype(np.uint8)] * 3)
    given = known[at].copy(), *(rest[0][at].copy() for _ in range(3))
    known[at], rest[:, at] = -1.0, 99
    low = np.full((2, len(known)), 0.5, np.float32)  # of no use where a shard has it all
    found, more = kernels.finish(place, at, *given, low, known, rest)
    assert found.tolist() == [truth[query] for query in each(rows)]
    assert more.tolist() == [[3 + truth[query] % 7 for query in each(rows)]] * 3


@quick
@given(rows_of, st.data())
def test_the_next_state_is_the_end_of_the_context_and_the_word(case, data) -> None:
    """As a slice of the tuple would be; unused columns are zero."""
    width, rows = case
    contexts, lengths, counts, words = arrays(width, rows)
    contexts[np.arange(width)[None, :] < (width - lengths.astype(int))[:, None]] = 0
    longest = [min(len(c) + 1, width) for c, w in rows for _ in w]
    kept = [data.draw(st.integers(0, n)) for n in longest]
    found, found_lengths = kernels.next_states(contexts, counts, words, np.array(kept, np.uint8))
    assert found_lengths.tolist() == kept
    for row, (context, word), n in zip(found.tolist(), each(rows), kept, strict=True):
        assert row[width - n :] == list((*context, word)[len(context) + 1 - n :])
        assert not any(row[: width - n])
