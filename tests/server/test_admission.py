"""dlm.server.admission: whose turn it is, by work, whoever and however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dlm.server import security
from dlm.server.admission import MESSAGE_WORK, WORK_AT_ONCE, Fair, Turns

AT_ONCE = WORK_AT_ONCE // MESSAGE_WORK  # messages that are small and ask nothing
LARGE = 100_000


class Room:
    """Calls that take turns; what was done, in its order."""

    def __init__(self, **given: Any) -> None:
        self.turns = Turns(MESSAGE_WORK, **{"at_once": 2, **given})
        self.done: list[str] = []

    def ask(self, name: str, client: str, connection: str, work: int = 0) -> asyncio.Task[None]:
        """A call of this client that notes its name in its turn."""

        async def call() -> None:
            security._caller.set(security.ClientUsage(client))
            security._bearer.set(security.Bearer(connection=connection))
            release = await self.turns.take(work)
            self.done.append(name)
            release()

        return asyncio.create_task(call())


def run(test: Callable[[], Awaitable[None]]) -> None:
    """On a loop of its own."""
    asyncio.run(test())  # type: ignore[arg-type]


def test_fair_takes_what_would_end_first() -> None:
    """Of two with equal work one after the other; little work before the rest of much."""
    fair = Fair()
    for number in range(3):
        fair.put("a", 10, f"a{number}")
    for number in range(3):
        fair.put("b", 10, f"b{number}")
    taken = [fair.take(), fair.take()]
    fair.put("c", 1, "c")
    taken += [fair.take() for _ in range(5)]
    assert taken == ["a0", "b0", "c", "a1", "b1", "a2", "b2"]
    assert not fair


@pytest.mark.parametrize("work", [0, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("client", "connection"), [("other", "3"), ("same", "3")], ids=["other", "same identity"]
)
def test_a_call_does_not_wait_for_the_many_of_another_connection(
    work: int, client: str, connection: str
) -> None:
    """It comes last, and is answered among the first."""

    async def test() -> None:
        room = Room()
        for number in range(300):
            room.ask("many", "same", str(number % 3), work)
        await asyncio.sleep(0)
        await room.ask("one", client, connection, work)
        assert room.done.index("one") <= 4 * AT_ONCE

    run(test)


def test_little_is_done_before_the_loop_looks_again() -> None:
    """Of small ones what fits, whether they waited or come just then."""

    async def test() -> None:
        room = Room()
        calls = [room.ask("a", "a", "1") for _ in range(10 * AT_ONCE)]
        before = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            assert len(room.done) - before <= AT_ONCE
            before = len(room.done)

    run(test)


def test_large_ones_wait_for_each_other_and_small_ones_do_not() -> None:
    """As many as may be at work; a small one passes by."""

    async def test() -> None:
        turns = Turns(MESSAGE_WORK, at_once=2)
        releases = [await turns.take(LARGE) for _ in range(2)]
        third = asyncio.create_task(turns.take(LARGE))
        (await turns.take(0))()
        assert not third.done()
        releases[0]()
        releases[0]()  # once more frees nothing
        fourth = asyncio.create_task(turns.take(LARGE))
        await third
        await asyncio.sleep(0.01)
        assert not fourth.done()
        releases[1]()
        await fourth

    run(test)


@pytest.mark.parametrize("granted", [False, True])
def test_a_call_that_goes_away_keeps_no_turn(granted: bool) -> None:
    """Neither while it waits, nor when its turn has just come."""

    async def test() -> None:
        turns = Turns(MESSAGE_WORK, at_once=1)
        release = await turns.take(LARGE)
        gone = asyncio.create_task(turns.take(LARGE))
        await asyncio.sleep(0)
        if granted:
            release()
            turns._looked()
            gone.cancel()
        else:
            gone.cancel()
            await asyncio.sleep(0)
            release()
        (await turns.take(LARGE))()
        with pytest.raises(asyncio.CancelledError):
            await gone

    run(test)
