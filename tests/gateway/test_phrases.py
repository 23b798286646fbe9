"""Phrases through a gateway: the client's bits, by every door, and an id in place of the list."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import WAIT_S, ModelFiles
from dlm.client import AsyncClient, Client, Phrases
from dlm.gateway import answers
from dlm.gateway.answers import PhraseStore, opened
from dlm.gateway.calls import GatewayTurns, countdown
from dlm.gateway.config import MIB
from dlm.server.refusals import Refusal
from dlm.units import LN_10
from dlm.wire._pb import lm_pb2 as pb
from dlm.wire.status import Reason
from gateway.gateways import DOORS, Caller, Refused, ThreadGateway

every_door = pytest.mark.parametrize("door", DOORS)


def said(files: ModelFiles) -> list[str]:
    """Words that are no marks."""
    return [word for word in files.words() if "<" not in word]


@pytest.fixture(scope="module")
def weights(files: ModelFiles) -> dict[str, float]:
    """Overlapping phrases, one with a word that the model lacks."""
    a, b, c = said(files)[:3]
    return {f"{a} {b}": 1.5, f"{b} {c}": 0.75, f"strangelove {a}": 2.25, c: -0.5}


def message(weights: dict[str, float]) -> pb.Phrases:
    """What a first request has."""
    phrases = [pb.Phrase(text=text, bonus=bonus) for text, bonus in weights.items()]
    return pb.Phrases(phrases=phrases)


@every_door
def test_a_beam_with_phrases_is_the_clients(
    callers: dict[str, Caller], files: ModelFiles, weights: dict[str, float], door: str
) -> None:
    """The list with the first step, then its id; scores, bonuses and states, of new words too."""
    words = [*said(files)[:5], "strangelove", "lacking"]
    with Client.local(files.directory) as client:
        utterance = client.utterance(phrases=weights)
        states = utterance.states([utterance.begin()])
        given: dict[str, Any] = {"phrases": message(weights)}
        for _ in range(3):
            expected = utterance.extend(states, words)
            reply = callers[door]("Extend", words=words, **given)
            assert (
                np.array(reply.log10_probs, np.float32).tobytes() == expected.log10_prob.tobytes()
            )
            assert np.array(reply.bonuses, np.float32).tobytes() == expected.bonus.tobytes()
            assert opened(reply.states) == expected.states.to_bytes()
            states = expected.states.reshape(-1)[:40]
            given = {"phrases": pb.Phrases(id=reply.phrases_id), "states": reply.states[:40]}
        best = callers[door]("NextWords", phrases=given["phrases"], state=reply.states[0])
        assert [one.id for one in best.words] == [
            word for word, _ in utterance.next_words(expected.states[0, 0], 10)
        ]


@every_door
def test_sentences_and_lists_have_their_bonus(
    callers: dict[str, Caller], files: ModelFiles, weights: dict[str, float], door: str
) -> None:
    """Beside the model's own score; in a list, outside of the scale of the model."""
    a, b, c = said(files)[:3]
    texts = [f"{a} {b} {c} strangelove {a}", f"{a}", f"strangelove {b}"]
    bonuses = [1.5 + 0.75 - 0.5 + 2.25, 0.0, 0.0]
    plain = callers[door]("Score", sentences=texts)
    reply = callers[door]("Score", sentences=texts, phrases=message(weights))
    assert [one.bonus for one in reply.scores] == bonuses
    assert [one.log10_prob for one in reply.scores] == [one.log10_prob for one in plain.scores]
    ranked = callers[door](
        "Rescore",
        hypotheses=[pb.Hypothesis(text=text) for text in texts],
        lm_scale=0.5,
        phrases=pb.Phrases(id=reply.phrases_id),
    )
    totals = {
        at: 0.5 * one.log10_prob * LN_10 + bonus * LN_10
        for at, (one, bonus) in enumerate(zip(plain.scores, bonuses, strict=True))
    }
    assert {one.index: one.total for one in ranked.hypotheses} == pytest.approx(totals)
    assert ranked.hypotheses[0].bonus == max(bonuses) * LN_10


def test_a_gateway_that_lacks_them_says_so(
    callers: dict[str, Caller], files: ModelFiles, weights: dict[str, float]
) -> None:
    """Then the list comes again, with states of the first gateway; by each door."""
    first = callers["grpc"]("Extend", words=said(files)[:5], phrases=message(weights))
    step: dict[str, Any] = {"states": first.states, "words": said(files)[:5]}
    known = pb.Phrases(id=first.phrases_id)
    expected = callers["json"]("Extend", phrases=known, **step)
    for door in DOORS:
        with ThreadGateway(lambda: AsyncClient.local(files.directory)) as other:
            caller = other.caller(door)
            with pytest.raises(Refused) as refused:
                caller("Extend", phrases=known, **step)
            assert refused.value.reason == "PHRASES_UNKNOWN"
            assert caller("Extend", phrases=message(weights), **step) == expected
            assert caller("Extend", phrases=known, **step) == expected


@pytest.mark.parametrize(
    "phrases",
    [
        pb.Phrases(phrases=[pb.Phrase(text="a", bonus=1.0)], id="00"),
        pb.Phrases(phrases=[pb.Phrase(text="a", bonus=1.0), pb.Phrase(text="a", bonus=2.0)]),
        pb.Phrases(phrases=[pb.Phrase(text="a", bonus=1.0), pb.Phrase(text=" a", bonus=2.0)]),
        pb.Phrases(phrases=[pb.Phrase(text=" ", bonus=1.0)]),
        pb.Phrases(phrases=[pb.Phrase(text="a <s>", bonus=1.0)]),
        pb.Phrases(phrases=[pb.Phrase(text="a", bonus=float("nan"))]),
        pb.Phrases(phrases=[pb.Phrase(text="a", bonus=float("inf"))]),
        pb.Phrases(phrases=[pb.Phrase(text="a " * 50, bonus=1.0)]),
    ],
)
def test_phrases_that_cannot_be_are_refused(
    callers: dict[str, Caller], phrases: pb.Phrases
) -> None:
    """In each call, by each door."""
    for caller in callers.values():
        for call in ("Score", "Extend", "NextWords", "Rescore"):
            with pytest.raises(Refused) as refused:
                caller(call, phrases=phrases)
            assert refused.value.reason == "MALFORMED"


def test_a_state_needs_its_phrases(callers: dict[str, Caller], weights: dict[str, float]) -> None:
    """With none or others it is refused, and so is one of a sentence without; or a changed one."""
    with_them = callers["grpc"]("Extend", word_ids=[3], phrases=message(weights))
    without = callers["grpc"]("Extend", word_ids=[3])
    known = pb.Phrases(id=with_them.phrases_id)
    (state,) = with_them.states
    changed = state[:17] + b"\xff" * 4 + state[21:]
    for states, phrases in (
        (with_them.states, None),
        (with_them.states, message({"a": 1.0})),
        (without.states, known),
        ([changed], known),
        ([state[:-4]], known),
    ):
        with pytest.raises(Refused) as refused:
            callers["json"]("Extend", states=states, word_ids=[3], phrases=phrases)
        assert refused.value.reason == "MALFORMED"


class Store(PhraseStore):
    """One of 1 MiB, asked for lists of made-up phrases."""

    def __init__(self) -> None:
        super().__init__(MIB, GatewayTurns().aside)

    async def use(
        self, phrases: pb.Phrases, held: ExitStack, left_s: float = WAIT_S
    ) -> Phrases | None:
        return await self.of(pb.ExtendRequest(phrases=phrases), 1000, countdown(left_s), held)

    async def keep(self, number: int, size: int) -> Phrases:
        """Sends a list, different for each number."""
        with ExitStack() as held:
            weights = {f"w{number} v{at}": 1.0 for at in range(size)}
            found = await self.use(message(weights), held)
            assert found is not None
            return found

    async def knows(self, phrases: Phrases) -> bool:
        try:
            with ExitStack() as held:
                return await self.use(pb.Phrases(id=phrases.digest), held) is phrases
        except Refusal:
            return False


async def test_the_memory_for_phrases_is_bounded() -> None:
    """By bytes; those used longest ago are forgotten, and one that is too large is kept alone."""
    store = Store()
    first = await store.keep(0, 100)
    second = await store.keep(1, 100)
    for number in range(2, 60):
        assert await store.knows(first)
        await store.keep(number, 100)
        assert store.bytes <= MIB
    assert not await store.knows(second)
    large = await store.keep(60, 20_000)
    assert await store.knows(large) and not await store.knows(first)
    await store.keep(61, 1)
    assert not await store.knows(large) and store.bytes < 10_000


async def test_phrases_of_calls_in_flight_are_not_forgotten() -> None:
    """They count until their calls end; a list for which they leave no memory is refused."""
    store = Store()
    with ExitStack() as held:
        used = [await store.keep(number, 800) for number in range(2)]
        for one in used:
            assert await store.use(pb.Phrases(id=one.digest), held) is one
        with pytest.raises(Refusal) as refused:
            await store.keep(2, 800)
        assert refused.value.reason is Reason.OVERLOADED
        assert "max_phrases_bytes" in refused.value.message
        assert await store.keep(0, 800) is used[0]
    await store.keep(2, 800)
    assert not await store.knows(used[1]) and store.bytes <= MIB


async def test_lists_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait take no memory beside their messages, and are refused at their deadline."""
    begun, go_on = [], threading.Event()

    def read(weights: dict[str, float]) -> Phrases:
        begun.append(len(weights))
        go_on.wait(WAIT_S)
        return Phrases(weights)

    monkeypatch.setattr(answers, "Phrases", read)
    store = Store()
    sent = message({"a": 1.0})
    with ExitStack() as held:
        first = asyncio.create_task(store.use(sent, held))
        others = [store.use(sent, held, 0.01) for _ in range(8)]
        for found in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(found, TimeoutError)
        go_on.set()
        assert await first is not None
    assert begun == [1]


def test_a_client_finds_its_own_phrases_only(opening: Any, tokens: Path) -> None:
    """Whoever guesses a list has its id; it must not show that another client sent this list."""
    with ThreadGateway(opening, tokens=str(tokens)) as gateway:
        for door in DOORS:
            alice, bob = (gateway.caller(door, name * 32) for name in "ab")
            sent = message({f"strangelove {door}": 1.0})
            known = pb.Phrases(id=alice("Extend", word_ids=[3], phrases=sent).phrases_id)
            with pytest.raises(Refused) as refused:
                bob("Extend", word_ids=[3], phrases=known)
            assert refused.value.reason == "PHRASES_UNKNOWN"
            bob("Extend", word_ids=[3], phrases=sent)
            for caller in (alice, bob):
                assert caller("Extend", word_ids=[3], phrases=known).bonuses
