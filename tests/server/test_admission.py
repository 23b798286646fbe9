"""dlm.server.admission: whose turn it is, by work, whoever and however many ask."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlm.server import security
from dlm.server.admission import LOOKS, MESSAGE_WORK, WORK_AT_ONCE, Fair, Turns

AT_ONCE = WORK_AT_ONCE // MESSAGE_WORK  # messages that are small and ask nothing
LARGE = 100_000


class Room:
    """Calls that take turns; what was done, in its order."""

    def __init__(self, **given: Any) -> None:
        self.turns = Turns(MESSAGE_WORK, **{"at_once": 2, **given})
        self.done: list[str] = []

    def ask(
        self, name: str, client: str, connection: str, work: int | None = 0
    ) -> asyncio.Task[None]:
        """A call of this client that notes its name in its turn: to be read, if it has no work."""

        async def call() -> None:
            security._speaks(security.ClientUsage(client), security.Bearer(), connection)
            if work is None:
                await self.turns.call()
                self.done.append(name)
                return
            release = await self.turns.take(work)
            self.done.append(name)
            release()

        return asyncio.create_task(call())


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


@pytest.mark.parametrize("work", [0, LARGE, None], ids=["small", "large", "unread"])
@pytest.mark.parametrize(
    ("client", "connection"), [("other", "3"), ("same", "3")], ids=["other", "same identity"]
)
async def test_a_call_does_not_wait_for_the_many_of_another_connection(
    work: int | None, client: str, connection: str
) -> None:
    """It comes last, and is answered among the first."""
    room = Room()
    for number in range(300):
        room.ask("many", "same", str(number % 3), work)
    await asyncio.sleep(0)
    await room.ask("one", client, connection, work)
    assert room.done.index("one") <= 4 * AT_ONCE


@pytest.mark.parametrize(
    ("work", "at_once"),
    [(0, AT_ONCE), (LARGE, AT_ONCE), (None, 1)],
    ids=["small", "large", "unread"],
)
async def test_little_begins_before_the_loop_has_looked_often(
    work: int | None, at_once: int
) -> None:
    """Of messages what fits, of calls that are not read yet one, whether they waited or come just
    then: gRPC accepts them faster, so they wait here."""
    room = Room(at_once=AT_ONCE, threads=True)
    calls = [room.ask("a", "a", "1", work) for _ in range(5 * at_once)]
    await asyncio.sleep(0)
    while not all(call.done() for call in calls):
        before = len(room.done)
        for _ in range(LOOKS):
            await asyncio.sleep(0)
        assert len(room.done) - before <= at_once


async def test_a_loop_that_has_nothing_to_do_is_left_alone() -> None:
    """Few messages do not make the loop look at the network. After a call it counts anew."""
    turns = Turns(MESSAGE_WORK, at_once=1)
    for _ in range(AT_ONCE - 1):
        await turns.take(0)
    assert not turns._looks
    await turns.call()
    for _ in range(LOOKS):
        assert turns._looks
        await asyncio.sleep(0)
    assert not turns._looks


async def test_large_ones_wait_for_each_other_and_small_ones_do_not() -> None:
    """As many as may be at work; a small one passes by."""
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


@pytest.mark.parametrize("granted", [False, True])
async def test_a_call_that_goes_away_keeps_no_turn(granted: bool) -> None:
    """Neither while it waits, nor when its turn has just come."""
    turns = Turns(MESSAGE_WORK, at_once=1)
    release = await turns.take(LARGE)
    gone = asyncio.create_task(turns.take(LARGE))
    await asyncio.sleep(0)
    if granted:
        release()
        gone.cancel()
    else:
        gone.cancel()
        await asyncio.sleep(0)
        release()
    (await turns.take(LARGE))()
    with pytest.raises(asyncio.CancelledError):
        await gone
