"""Calls that end by their deadline, whatever holds up the process that makes them."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from client.questions import assert_equal, random_queries, random_sentences
from cluster import WAIT_S, ModelFiles
from dlm.client import AsyncClient, Utterance, loop
from dlm.errors import ConfigError, DeadlineExceeded, Overloaded


@contextmanager
def loop_held() -> Iterator[None]:
    """The client's loop does nothing meanwhile."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        done.wait(WAIT_S)

    loop.post(hold)
    assert held.wait(WAIT_S)
    try:
        yield
    finally:
        done.set()


def client_calls(utterance: Utterance) -> int:
    """Calls, or parts of them, that its client has counted."""
    return sum(utterance._core.counts.calls.values())


def bits(found: Any) -> Any:
    """Everything in it, to compare."""
    if isinstance(found, np.ndarray):
        return found.shape, found.dtype, found.tobytes()
    if is_dataclass(found):
        return [bits(getattr(found, field.name)) for field in fields(found)]
    return found


# -- planning -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(files: ModelFiles) -> list[str]:
    """8,000 sentences."""
    rng = np.random.default_rng(9)
    words = files.words()
    some = [" ".join(words[i] for i in rng.integers(3, len(words), 12)) for _ in range(1000)]
    return some * 8


@pytest.mark.parametrize("bigram_fallback", [False, True], ids=["full", "bigram_fallback"])
def test_a_call_that_is_too_large_for_its_deadline_ends_before_all_of_it_is_planned(
    cluster, connect, text, bigram_fallback: bool
) -> None:
    """By the processor time of its caller's thread, which a busy machine does not change."""
    utterance = connect(cluster, bigram_fallback=bigram_fallback).utterance()
    begun = time.thread_time()
    assert len(utterance.score_sentences(text, deadline_s=WAIT_S)) == len(text)
    whole_s = time.thread_time() - begun
    least_s = whole_s
    for _ in range(5):
        begun = time.thread_time()
        # Overloaded where other work keeps the servers busy.
        with pytest.raises((DeadlineExceeded, Overloaded), match=r"0\.01 s|pace"):
            utterance.score_sentences(text, deadline_s=0.01)
        least_s = min(least_s, time.thread_time() - begun)
    assert least_s < whole_s / 4


def test_an_event_loop_goes_on_while_a_large_call_is_planned(cluster, connect, text) -> None:
    """By the processor time between two turns of another task."""

    async def both() -> tuple[float, float]:
        async with await AsyncClient.connect(
            cluster.addresses, connect(cluster)._core.config
        ) as client:
            call = asyncio.create_task(client.utterance().score_sentences(text, deadline_s=WAIT_S))
            begun = last = time.thread_time()
            longest = 0.0
            while not call.done():
                await asyncio.sleep(0)
                if not call.done():  # results of a call that is answered are made at once
                    longest = max(longest, time.thread_time() - last)
                last = time.thread_time()
            assert len(call.result()) == len(text)
            return longest, last - begun

    gc.disable()  # a collection looks at all that other tests left, in one turn
    try:
        longest, whole = asyncio.run(both())
    finally:
        gc.enable()
    assert longest < whole / 3


def test_a_call_in_parts_has_the_answers_of_one_that_is_whole(
    files, cluster, connect, monkeypatch
) -> None:
    """Wherever it is cut: between sentences, within one, between states, among their words."""
    utterance = connect(cluster).utterance()
    queries = random_queries(files.oracle, 5, 100)
    contexts, words = [c for c, _ in queries], [w for _, w in queries]
    sentences = [*random_sentences(files.oracle, 7, 30), []]
    sentences += [" ".join(w for s in sentences for w in s) + " \t  \n"]  # longer than two parts
    states = [utterance.null(), utterance.begin()]
    many = utterance.extend(states, words[:20]).states.reshape(-1)
    rows = np.arange(len(many) * 3, dtype=np.uint32).reshape(-1, 3) % utterance.vocabulary_size

    def asked() -> list[Any]:
        out: list[Any] = [utterance.score(contexts, words)]
        out += [utterance.extend(states, words), utterance.extend(many, [3, 1, 4])]
        out += [utterance.extend(list(many), rows.tolist()), utterance.extend(many, rows)]
        for bos, eos in ((True, True), (False, False)):
            out += utterance.score_sentences(sentences, bos=bos, eos=eos)
        return [bits(found) for found in [*out, utterance.next_words(states[1], 15)]]

    whole = asked()
    monkeypatch.setattr("dlm.client.inputs.PART", 7)
    monkeypatch.setattr("dlm.client.phrases.SPLIT_BYTES", 16)
    before = client_calls(utterance)
    assert asked() == whole
    assert client_calls(utterance) - before > 100


# -- an asyncio client that has not connected -----------------------------------------------------


def test_a_copy_of_an_asyncio_client_connects_while_its_loop_goes_on(
    files, cluster, connect
) -> None:
    """Awaited, or by its first call, which its deadline ends; what cannot wait says what to do."""
    config = connect(cluster)._core.config
    client = asyncio.run(AsyncClient.connect(cluster.addresses, config))
    frozen = pickle.dumps(client)
    queries = random_queries(files.oracle, 3, 60)
    contexts, words = [c for c, _ in queries], [w for _, w in queries]
    expected = [files.oracle.score(c, w) for c, w in queries]

    async def use() -> None:
        awaited, called = pickle.loads(frozen), pickle.loads(frozen)
        for unknown in (lambda: called.vocabulary, called.utterance().begin):
            with pytest.raises(ConfigError, match=r"await client\.utterance\(\)"):
                unknown()
        with loop_held():  # so it cannot connect yet
            handle = called.utterance(deadline_s=0.05)
            with pytest.raises(DeadlineExceeded, match="connected"):
                await handle.score(contexts, words)
        for answers in (
            await handle.score(contexts, words, deadline_s=WAIT_S),
            await (await awaited.utterance()).score(contexts, words, deadline_s=WAIT_S),
            await (await awaited.utterance()).score(contexts, words, deadline_s=WAIT_S),
        ):
            assert_equal(answers, expected)
        assert called.vocabulary.words == files.oracle.vocabulary.words
        await asyncio.gather(awaited.close(), called.close(), client.close())

    asyncio.run(use())
