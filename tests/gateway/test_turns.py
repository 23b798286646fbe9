"""dlm.gateway.calls: what a call waits for, and for how long."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from typing import Any

import pytest

from cluster import WAIT_S, ModelFiles, until
from dlm.client import AsyncClient
from dlm.gateway.answers import LanguageModel
from dlm.gateway.calls import (
    LARGE_AT_ONCE,
    SMALL_QUERIES,
    GatewayTurns,
    countdown,
    refusal_of,
    work_of,
)
from dlm.gateway.config import GatewayConfig
from dlm.gateway.metrics import GatewayMetrics
from dlm.server import security
from dlm.server.admission import LOOKS
from dlm.server.refusals import Refusal
from dlm.wire._pb import lm_pb2 as pb
from dlm.wire.status import Reason
from gateway.gateways import DOORS, ThreadGateway


async def test_a_call_whose_turn_does_not_come_in_time_is_late() -> None:
    """And holds nothing up."""
    turns = GatewayTurns()
    held = [await turns.take(SMALL_QUERIES + 1) for _ in range(LARGE_AT_ONCE)]
    with pytest.raises(TimeoutError) as late:
        await turns.take(SMALL_QUERIES + 1, 0.01)
    assert refusal_of("Score", late.value).reason is Reason.LATE
    held[0]()
    await turns.take(SMALL_QUERIES + 1, WAIT_S)


async def test_work_aside_leaves_the_loop_to_others() -> None:
    """One at a time; what waits longer than its caller is refused, and never done."""
    begun, go_on = [], threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        go_on.wait(WAIT_S)
        return number

    turns = GatewayTurns()
    first = asyncio.create_task(turns.aside(lambda: work(1), 1, WAIT_S))
    await asyncio.sleep(0)  # it begins
    with pytest.raises(TimeoutError):
        await turns.aside(lambda: work(2), 1, 0.01)
    go_on.set()
    assert await first == 1
    assert await turns.aside(lambda: work(3), 1, WAIT_S) == 3
    assert begun == [1, 3]


async def test_work_aside_takes_turns() -> None:
    """Of two clients one after the other, however much of the first one's waits."""
    done: list[str] = []
    go_on = threading.Event()

    async def ask(client: str) -> None:
        security._caller.set(security.ClientUsage(client))
        await turns.aside(lambda: go_on.wait(WAIT_S) and done.append(client), 1, WAIT_S)

    turns = GatewayTurns()
    calls = [asyncio.create_task(ask(client)) for client in ["many"] * 9 + ["one"]]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*calls)
    assert done.index("one") <= 2


@pytest.mark.parametrize(
    ("call", "request_", "least"),
    [
        ("Extend", pb.ExtendRequest(states=[b"a", b"b"], words=["c"] * 9), 18),
        ("Extend", pb.ExtendRequest(states=[b"a", b"b"], word_ids=[3] * 8, own_words=True), 8),
        ("Score", pb.SentencesRequest(sentences=["a"] * 400), SMALL_QUERIES),
        ("Score", pb.SentencesRequest(sentences=["a " * 4000]), SMALL_QUERIES),
        ("Score", pb.SentencesRequest(ids=[pb.WordIds(ids=[3] * 4000)]), SMALL_QUERIES),
        ("Rescore", pb.RescoreRequest(hypotheses=[pb.Hypothesis(text="a")] * 400), SMALL_QUERIES),
        ("NextWords", pb.NextWordsRequest(), 2048),
        ("NextWords", pb.NextWordsRequest(count=10_000), SMALL_QUERIES),
        ("Models", pb.ModelsRequest(), 0),
    ],
)
def test_a_call_is_charged_for_what_it_asks(call: str, request_: Any, least: int) -> None:
    """By its kind: however few bytes ask for it."""
    assert least <= work_of(call, request_) < max(20 * least, 1)


@pytest.mark.parametrize("reply", ["words", "sentences"])
async def test_the_loop_looks_while_a_long_reply_is_written(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, reply: str
) -> None:
    """As often as another call needs, again and again."""
    monkeypatch.setattr("dlm.gateway.answers.PAUSE", 1)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    client = await AsyncClient.local(files.directory)
    model = LanguageModel(client, GatewayConfig(), GatewayMetrics(), GatewayTurns().aside)
    ticking = asyncio.create_task(tick())
    with ExitStack() as held:
        if reply == "words":
            await model.next_words(pb.NextWordsRequest(count=20), countdown(WAIT_S), held)
        else:
            asked = pb.SentencesRequest(sentences=["a"] * 20)
            await model.score(asked, countdown(WAIT_S), held)
    ticking.cancel()
    await client.close()
    assert ticks >= 19 * LOOKS


@pytest.mark.parametrize("door", ["page", *DOORS])
def test_every_request_waits_for_its_turn_unread(gateway: ThreadGateway, door: str) -> None:
    """A page, too, and a call by each door."""
    turns = gateway.running.calls.turns
    turns._calls.free = 0
    with ThreadPoolExecutor(1) as aside:
        if door == "page":
            answer = aside.submit(
                urllib.request.urlopen, f"http://127.0.0.1:{gateway.running.http_port}"
            )
        else:
            answer = aside.submit(gateway.caller(door), "Models")
        until(lambda: len(turns._calls._clients) == 1)
        assert not answer.done()
        turns._calls.free = inf
        gateway.running._loop.call_soon_threadsafe(turns._end_of(turns._calls))
        assert answer.result(WAIT_S)


def test_no_time_left_is_too_late() -> None:
    """What has no time is late, never a wrong request."""
    with pytest.raises(Refusal) as refused:
        countdown(0.0)()
    assert refused.value.reason is Reason.LATE
