"""Baselines: the same scores, and as many messages as were computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster import ModelFiles
from dlm.ngram.partition import slots_of
from loadtest.baselines.hash_index import HashIndex, Ngrams
from loadtest.baselines.kernels import WHOLE
from loadtest.baselines.systems import (
    SYSTEMS,
    Cache,
    Call,
    Caller,
    Placed,
    calls_of,
    counted,
    imbalance,
    slot_bytes,
)
from loadtest.traces.trace import Trace


@pytest.fixture(scope="module")
def ngrams(files: ModelFiles) -> Ngrams:
    """Of the model of all tests."""
    return Ngrams.of(files.directory)


@pytest.fixture(scope="module")
def calls(files: ModelFiles, trace: Trace) -> list[Call]:
    """The trace's, and one of all pairs of words after random contexts of every length."""
    oracle = files.oracle
    rng = np.random.default_rng(3)
    size, width = len(oracle.vocabulary), oracle.order - 1
    lengths = rng.integers(0, width + 1, 40).astype(np.uint8)
    known = [g for g in oracle.ngrams if len(g) == width]
    contexts = np.array([known[at] for at in rng.integers(0, len(known), 40)], np.uint32)
    contexts[::3] = rng.integers(0, size, contexts[::3].shape)
    contexts[np.arange(width) < width - lengths[:, None].astype(int)] = 0
    more = Call.of(contexts, lengths, np.arange(size, dtype=np.uint32))
    return [*calls_of(trace, oracle.vocabulary, oracle.order), more]


def scores_of(files: ModelFiles, call: Call) -> np.ndarray:
    """The oracle's, of each distinct query."""
    width = call.contexts.shape[1]
    found = []
    for row, word in zip(call.row.tolist(), call.words.tolist(), strict=True):
        context = call.contexts[row, width - int(call.lengths[row]) :].tolist()
        found.append(files.oracle.score(context, word).log10_prob)
    return np.array(found, np.float32)


def test_hash_index_gives_the_bits_of_the_oracle(
    files: ModelFiles, ngrams: Ngrams, calls: list[Call]
) -> None:
    """And says how often it searched."""
    index = HashIndex(ngrams)
    call = calls[-1]
    found, orders, searches = index.score(
        call.contexts[call.row], call.lengths[call.row], call.words
    )
    assert found.tobytes() == scores_of(files, call).tobytes()
    assert len(call.words) < searches <= len(call.words) * (2 * files.oracle.order - 1)
    assert set(orders.tolist()) == set(range(1, files.oracle.order + 1))


def test_ngrams_are_read_as_they_were_written(ngrams: Ngrams, tmp_path: Path) -> None:
    """All arrays of all orders."""
    ngrams.write(tmp_path / "n.npz")
    read = Ngrams.read(tmp_path / "n.npz")
    assert read.vocabulary_size == ngrams.vocabulary_size
    for one, other in zip(read.orders, ngrams.orders, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_system_scores_as_the_oracle(
    name: str, servers: int, files: ModelFiles, ngrams: Ngrams, calls: list[Call]
) -> None:
    """From what each server holds alone, bit for bit."""
    placed = Placed(SYSTEMS[name], ngrams, servers)
    shares = [placed.share(ngrams, server) for server in range(servers)]
    caller = Caller(placed, Cache.of(ngrams), len(ngrams.orders))
    for call in calls:
        rounds = caller.rounds(call)
        try:
            messages = next(rounds)
            while True:
                assert messages.groups
                if placed.system.batched:
                    assert len(set(messages.servers.tolist())) == len(messages.servers)
                else:
                    assert all(len(groups.words) == 1 for groups in messages.groups)
                messages = rounds.send(
                    [
                        shares[server].answer(placed.system.mode, groups)[0]
                        for server, groups in zip(messages.servers, messages.groups, strict=True)
                    ]
                )
        except StopIteration as done:
            assert done.value.tobytes() == scores_of(files, call).tobytes()


def test_servers_share_out_what_is_stored(ngrams: Ngrams) -> None:
    """Each long n-gram is on one server, and the balance follows from where they are."""
    for name in ("dlm", "A", "B"):
        placed = Placed(SYSTEMS[name], ngrams, 4)
        records = placed.records(ngrams)
        shares = [placed.share(ngrams, server).records for server in range(4)]
        low = 0
        if placed.system.mode == WHOLE:
            low = sum(len(rows) for rows, _, _ in ngrams.orders[1:2])
            low += int((ngrams.orders[1][2] != 0).sum())
        assert [sum(one) - low for one in shares] == records.tolist()
        whole = sum(len(rows) + int((w != 0).sum()) for rows, _, w in ngrams.orders[2:])
        assert records.sum() == whole
    assert imbalance(np.array([3, 1])) == 0.5
    assert int(slot_bytes(ngrams).sum()) == 8 * whole


def plain_messages(
    name: str, files: ModelFiles, ngrams: Ngrams, calls: list[Call], placed: Placed
) -> int:
    """Messages by sets of n-grams, in plain Python: dlm, A and B of `SYSTEMS`."""
    stored = {tuple(pair) for pair in ngrams.stored_pairs().tolist()}
    known = files.oracle.ngrams
    total = 0

    def at(method: str, gram: tuple[int, ...]) -> int:
        return int(getattr(placed, method)(np.array([gram], np.uint32))[0])

    for call in calls:
        servers: set[int] = set()
        asked: set[tuple[str, tuple[int, ...]]] = set()
        width = call.contexts.shape[1]
        for row, word in zip(call.row.tolist(), call.words.tolist(), strict=True):
            context = tuple(call.contexts[row, width - int(call.lengths[row]) :].tolist())
            if len(context) < 2 or context[-2:] not in stored:
                continue
            if name == "dlm":
                servers.add(int(placed.slots[slots_of(*np.array([context[-2:]], np.uint32).T)[0]]))
            elif name == "A":
                servers.add(at("of_probs", (*context[-2:], word)))
                servers |= {at("of_weights", context)} if len(context) > 2 else set()
            else:
                for length in range(len(context), 1, -1):
                    gram = (*context[len(context) - length :], word)
                    asked.add(("prob", gram))
                    if gram in known:
                        break
                    if length > 2:
                        asked.add(("weight", gram[:-1]))
        total += len(servers) + len(asked)
    return total


@pytest.mark.parametrize("name", ["dlm", "A", "B"])
def test_messages_are_those_of_a_plain_count(
    name: str, files: ModelFiles, ngrams: Ngrams, calls: list[Call]
) -> None:
    """For one server and for several."""
    for servers in (1, 5):
        placed = Placed(SYSTEMS[name], ngrams, servers)
        counts = counted(calls, placed, Cache.of(ngrams), HashIndex(ngrams), 1.0)
        assert counts.messages.sum() == plain_messages(name, files, ngrams, calls, placed)


def test_the_order_of_the_paper_holds(ngrams: Ngrams, calls: list[Call]) -> None:
    """Messages: dlm at most A's, A's below B's; without batching more, with one word fewer hits."""
    cache, whole = Cache.of(ngrams), HashIndex(ngrams)
    found = {
        name: int(counted(calls, Placed(one, ngrams, 4), cache, whole, 1.0).messages.sum())
        for name, one in SYSTEMS.items()
    }
    assert found["dlm"] <= found["A"] < found["B"]
    assert found["dlm"] < found["dlm-unbatched"] < found["srilm"]
    assert found["dlm"] <= found["dlm-paper"] <= found["dlm-uncached"]
    assert found["B-batched"] < found["B"]
