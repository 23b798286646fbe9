"""A call ends once, whoever ends it, and everybody who waits is told."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from cluster import WAIT_S
from dlm.client.call import Ending, send
from dlm.errors import DlmError


def test_of_many_who_end_it_one_counts_and_all_who_wait_see_the_same() -> None:
    """Eight threads with an error each, eight that wait, a callback each; two hundred times."""
    for _ in range(200):
        ending, start = Ending(), threading.Barrier(16)
        told: list[BaseException | None] = []

        def end(number: int, ending: Ending = ending, start: threading.Barrier = start) -> bool:
            start.wait(WAIT_S)
            return ending.end(DlmError(str(number)))

        def wait(
            _: int,
            ending: Ending = ending,
            start: threading.Barrier = start,
            told: list[BaseException | None] = told,
        ) -> BaseException | None:
            start.wait(WAIT_S)
            ending.add_done_callback(lambda ended: told.append(ended.exception(0)))
            return ending.exception(WAIT_S)

        with ThreadPoolExecutor(16) as pool:
            ends = [pool.submit(end, number) for number in range(8)]
            waits = [pool.submit(wait, number) for number in range(8)]
            won = [number for number, one in enumerate(ends) if one.result(WAIT_S)]
            seen = [one.result(WAIT_S) for one in waits]
        assert len(won) == 1
        assert {str(error) for error in seen} == {str(won[0])}
        assert told == seen


def test_it_is_cancelled_only_before_it_ends() -> None:
    """And whoever waits for what was cancelled is told so."""
    ending = Ending()
    with pytest.raises(TimeoutError):
        ending.result(0.0)
    assert ending.cancel() and ending.cancelled() and ending.done()
    assert not ending.end() and not ending.cancel()
    with pytest.raises(CancelledError):
        ending.result(0.0)
    well = Ending()
    assert well.end() and not well.cancel() and not well.cancelled()
    assert well.exception() is None


def test_a_callback_that_fails_keeps_no_other_from_being_called() -> None:
    """Before the end, and after it."""
    ending, called = Ending(), []
    ending.add_done_callback(lambda _: 1 / 0)
    ending.add_done_callback(lambda _: called.append("before"))
    ending.end()
    ending.add_done_callback(lambda _: 1 / 0)
    ending.add_done_callback(lambda _: called.append("after"))
    assert called == ["before", "after"]


def test_an_event_loop_waits_for_what_a_thread_ends() -> None:
    """In vain, then with a thread that ends it, then for what has ended."""

    async def wait() -> list[bool]:
        ending = Ending()
        found = [await ending.wait(0.001)]
        thread = threading.Thread(target=ending.end)
        waits = asyncio.create_task(ending.wait(WAIT_S))
        await asyncio.sleep(0)
        thread.start()
        found += [await waits, await ending.wait(0.0)]
        thread.join()
        return found

    assert asyncio.run(wait()) == [False, True, True]


@pytest.mark.parametrize(
    ("asking", "sent"),
    [
        ([True, True, True], ["planned 0", "planned 1", "planned 2", "sent 0", "sent 1", "sent 2"]),
        # The second asks nothing more: what the others ask is sent at the end of the turn.
        ([True, False, True], ["planned 0", "planned 2", "sent 0", "sent 2"]),
        ([True], ["planned 0", "sent 0"]),
    ],
)
def test_what_tasks_that_are_woken_together_ask_is_sent_together(asking, sent) -> None:
    """After the last of them has planned."""
    seen: list[str] = []

    async def task(number: int, ending: Ending, asks: bool) -> None:
        assert await ending.wait(WAIT_S)
        if asks:
            seen.append(f"planned {number}")
            send(lambda call: seen.append(f"sent {call}"), number)

    async def run() -> None:
        endings = [Ending() for _ in asking]
        tasks = [
            asyncio.create_task(task(number, ending, asks))
            for number, (ending, asks) in enumerate(zip(endings, asking, strict=True))
        ]
        await asyncio.sleep(0)
        for ending in endings:
            ending.end()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert seen == sent


def test_a_task_that_blocks_its_event_loop_still_gets_its_answer() -> None:
    """What others of the loop asked is sent before, as the loop cannot."""
    sent: list[int] = []

    async def task(number: int, ending: Ending) -> None:
        assert await ending.wait(WAIT_S)
        if number == 0:
            send(sent.append, number)
        elif number == 1:
            with pytest.raises(TimeoutError):
                Ending().exception(0.0)
            assert sent == [0]

    async def run() -> None:
        endings = [Ending() for _ in range(3)]
        tasks = [asyncio.create_task(task(*one)) for one in enumerate(endings)]
        await asyncio.sleep(0)
        for ending in endings:
            ending.end()
        await asyncio.gather(*tasks)

    asyncio.run(run())
