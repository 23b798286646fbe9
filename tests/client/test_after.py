"""What is done about a message after something has happened to it: the table of `after`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dlm.client.after import (
    LEAST_S,
    MAX_PAUSE_S,
    Again,
    Alone,
    Decision,
    Done,
    Elsewhere,
    Failed,
    GiveUp,
    Heard,
    Late,
    Later,
    Look,
    Looked,
    Move,
    NotYet,
    Outcome,
    TokenBucket,
    after,
    after_call,
    after_file,
    after_files,
    after_stream,
)
from dlm.client.runtime import HEDGE_BURST, HEDGED
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    QueryError,
    ShardDown,
    StaleShardSet,
    UnavailableError,
)
from dlm.wire.status import Reason, error_from_refusal

NOBODY: frozenset[str] = frozenset()


@dataclass
class Message:
    """A message to a shard of two servers, sent to the first at 0 and due at 1."""

    ended: bool = False
    deadline: float = 1.0
    rounds: int = 0
    taken_over: bool = False
    out: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=lambda: ["a"])
    untried: set[str] = field(default_factory=lambda: {"b"})


def failed(error: DlmError, **more: Any) -> Failed:
    """Tokens are left, all servers are in their places, and the last look was just now."""
    return Failed(error, **{"retries": 1.0, "moving": False, "due": False, "closed": False, **more})


def late(**more: Any) -> Late:
    """Sent at 0, wanted by 1; hedging is on, and all servers are well."""
    settings: dict[str, Any] = {
        "since": 0.0,
        "until": 1.0,
        "hedges": 1.0,
        "avoided": NOBODY,
        "slow": NOBODY,
        "all_slow": False,
        "heard": {"b": Heard(0.01)},
        "closed": False,
        **more,
    }
    known: Mapping[str, Heard] = settings["heard"]

    def heard(others: Set[str]) -> Mapping[str, Heard]:
        return {address: known[address] for address in others}

    return Late(**{**settings, "heard": heard})


MOVING = error_from_refusal(Reason.DRAINING, "stops", where="a")
MOVING.reason = Reason.DRAINING  # type: ignore[attr-defined]
EVERY = {"tried": ["a", "b"], "untried": set[str]()}  # was asked in vain
HAS_IT = {"out": ["a"]}


@pytest.mark.parametrize(
    ("outcome", "message", "expected"),
    [
        (failed(ShardDown()), {}, Elsewhere(limited=True)),
        (failed(DeadlineExceeded()), {}, Elsewhere(limited=True)),
        (failed(Overloaded()), {}, Elsewhere(limited=True)),
        (failed(ProtocolError()), {}, Elsewhere(limited=True)),
        (failed(AuthenticationError()), {}, Elsewhere(limited=True)),
        (failed(ShardDown()), {"tried": ["a", "c"]}, GiveUp()),  # once
        (failed(ShardDown(), retries=0.9), {}, GiveUp()),
        (failed(ShardDown()), {"deadline": 0.5}, GiveUp()),
        (failed(ShardDown(), closed=True, due=True), {}, GiveUp()),
        (failed(QueryError(), due=True), {}, GiveUp()),
        (failed(DlmError("no memory"), due=True), {}, GiveUp()),
        (failed(MOVING, retries=0.0), {"tried": ["a", "c"]}, Elsewhere()),  # as many as there are
        (failed(MOVING, moving=True), EVERY, Later(0.05)),
        (failed(ShardDown(), moving=True), {**EVERY, "rounds": 1}, Later(0.1)),
        (failed(ShardDown(), moving=True), {**EVERY, "rounds": 9}, Later(MAX_PAUSE_S)),
        (failed(ShardDown(), moving=True), {**EVERY, "deadline": 0.52}, GiveUp()),
        (failed(DeadlineExceeded(), moving=True), EVERY, GiveUp()),  # silent, not rolled
        (failed(StaleShardSet()), {"tried": ["a", "c"]}, Look()),
        (failed(ShardDown(), due=True), EVERY, Look()),
        (failed(ShardDown(), due=True), {"tried": ["a", "c"]}, GiveUp(look=True)),
        (failed(DeadlineExceeded(), due=True), EVERY, GiveUp(look=True)),
        (failed(ShardDown()), {**HAS_IT, **EVERY}, Done()),
        (failed(ShardDown()), HAS_IT, NotYet(0.75)),  # a third may get it
        (Looked(stale=False, same=True, wanted=True), {}, Elsewhere()),
        (Looked(stale=False, same=True, wanted=True), EVERY, GiveUp()),
        (Looked(stale=False, same=False, wanted=True), {}, Move()),
        (Looked(stale=False, same=False, wanted=False), {}, GiveUp()),
        (Looked(stale=True, same=True, wanted=True), {}, Move()),
        (late(), HAS_IT, Elsewhere(hedge=True, limited=True)),
        (late(), {"out": ["a", "b"]}, Done()),
        (late(), {**HAS_IT, "deadline": 0.5}, Done()),
        (late(closed=True), HAS_IT, Done()),
        (late(hedges=0.0), HAS_IT, Elsewhere(["b"])),  # half of its time is over
        (late(hedges=0.0), {**HAS_IT, "taken_over": True}, Done()),
        (late(hedges=0.0, until=1.5), HAS_IT, NotYet(0.75)),
        (late(avoided={"b"}), HAS_IT, NotYet(0.75)),
        (late(slow={"b"}), HAS_IT, Elsewhere(["b"])),
        (late(all_slow=True, heard={"b": Heard(2.0)}), HAS_IT, NotYet(0.75)),
        (late(hedges=0.0, until=0.5 + LEAST_S, heard={"b": Heard(2.0)}), HAS_IT, None),
        (late(), {**HAS_IT, **EVERY}, NotYet(0.75)),
    ],
)
def test_one_table_says_what_is_done(
    outcome: Outcome, message: dict[str, Any], expected: Decision | None
) -> None:
    """At 0.5; and nothing is done about a message that has ended."""
    standing = Message(**message)
    found = after(outcome, standing, 0.5)
    if expected is None:  # nobody may take over: soon, but not at once
        expected = NotYet(0.5 + LEAST_S)
    assert found == expected and type(found) is type(expected)
    assert isinstance(after(outcome, replace(standing, ended=True), 0.5), Done)


def test_a_late_message_is_asked_of_another_while_few_are_late() -> None:
    """Five in a hundred in the long run, and a hundred at once."""
    bucket, message = TokenBucket(HEDGED, HEDGE_BURST), Message(out=["a"])

    def hedges() -> bool:
        return after(late(hedges=bucket.saved), message, 0.1) == Elsewhere(
            hedge=True, limited=bucket.spend()
        )

    assert sum(hedges() for _ in range(500)) == 100
    hedged = 0
    for _ in range(10_000):
        bucket.earn()
        hedged += hedges()
    assert 499 <= hedged <= 500


@pytest.mark.parametrize(
    ("wanted", "left_s", "changed", "lost", "expected"),
    [
        (True, 1.0, True, False, Elsewhere()),
        (True, 0.0, True, True, Elsewhere()),
        (True, 1.0, False, True, Alone()),
        (True, 0.0, False, True, GiveUp()),
        (True, 1.0, False, False, GiveUp()),
        (False, 1.0, True, True, GiveUp()),
    ],
)
def test_a_message_of_a_stream_that_ended_is_sent_again_if_that_may_help(
    wanted: bool, left_s: float, changed: bool, lost: bool, expected: Decision | Alone
) -> None:
    """With another token, or because nobody knows why it ended."""
    found = after_stream(wanted, left_s, changed=changed, lost=lost)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("settled", "calls", "left_s", "expected"),
    [
        (False, 1, 1.0, Move()),
        (True, 1, 1.0, GiveUp()),
        (False, 2, 1.0, GiveUp()),
        (False, 1, 0.0, GiveUp()),
    ],
)
def test_a_new_utterance_moves_to_the_model_that_replaced_its_own(
    settled: bool, calls: int, left_s: float, expected: Decision
) -> None:
    """Unless its caller has anything of the old one, another call needs it, or no time is left."""
    found = after_call(settled, calls, left_s)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("tries", "wrong", "resumed", "expected"),
    [
        (1, False, False, Again()),  # it broke: resumed where it stopped
        (1, True, True, Again()),  # its beginning was another server's
        (1, True, False, Elsewhere()),
        (2, False, True, Elsewhere()),
        (2, True, True, Elsewhere()),
    ],
)
def test_a_server_is_asked_for_a_file_once_more_if_that_may_help(
    tries: int, wrong: bool, resumed: bool, expected: Again | Elsewhere
) -> None:
    """Then the next one is."""
    assert type(after_file(tries, wrong=wrong, resumed=resumed)) is type(expected)


@pytest.mark.parametrize(
    ("error", "left_s", "expected"),
    [
        (Overloaded("too many downloads"), 2.0, Later(0.5)),
        (Overloaded("too many downloads"), 0.5, GiveUp()),
        (StaleShardSet("another model"), 2.0, GiveUp()),
    ],
)
def test_all_servers_are_asked_for_a_file_once_more_if_time_may_help(
    error: UnavailableError, left_s: float, expected: Decision
) -> None:
    """After the pause, if that leaves any time."""
    found = after_files(error, 0.5, left_s)
    assert found == expected and type(found) is type(expected)
