"""What is done about a message after something has happened to it: the table of `after`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
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
    after,
    after_call,
    after_file,
    after_files,
    after_stream,
)
from dlm.errors import (
    AuthenticationError,
    DeadlineExceeded,
    DlmError,
    Overloaded,
    ProtocolError,
    QueryError,
    ShardDown,
    StaleShardSet,
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


BUSY = Overloaded("too many downloads")


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        # A message of a stream that ended is sent again with another token, or alone where nobody
        # knows why it ended.
        (partial(after_stream, True, 1.0, changed=True, lost=False), Elsewhere()),
        (partial(after_stream, True, 0.0, changed=True, lost=True), Elsewhere()),
        (partial(after_stream, True, 1.0, changed=False, lost=True), Alone()),
        (partial(after_stream, True, 0.0, changed=False, lost=True), GiveUp()),
        (partial(after_stream, True, 1.0, changed=False, lost=False), GiveUp()),
        (partial(after_stream, False, 1.0, changed=True, lost=True), GiveUp()),
        # A new utterance moves to the model that replaced its own, unless its caller has anything
        # of the old one, another call needs it, or no time is left.
        (partial(after_call, False, 1, 1.0), Move()),
        (partial(after_call, True, 1, 1.0), GiveUp()),
        (partial(after_call, False, 2, 1.0), GiveUp()),
        (partial(after_call, False, 1, 0.0), GiveUp()),
        # A server is asked for a file once more if it broke, or its beginning was another's.
        (partial(after_file, 1, wrong=False, resumed=False), Again()),
        (partial(after_file, 1, wrong=True, resumed=True), Again()),
        (partial(after_file, 1, wrong=True, resumed=False), Elsewhere()),
        (partial(after_file, 2, wrong=False, resumed=True), Elsewhere()),
        (partial(after_file, 2, wrong=True, resumed=True), Elsewhere()),
        # All servers are asked for it once more after a pause, if that helps and leaves time.
        (partial(after_files, BUSY, 0.5, 2.0), Later(0.5)),
        (partial(after_files, BUSY, 0.5, 0.5), GiveUp()),
        (partial(after_files, StaleShardSet("another model"), 0.5, 2.0), GiveUp()),
    ],
)
def test_what_is_done_about_streams_utterances_and_files(
    ask: Callable[[], Any], expected: Decision | Alone | Again
) -> None:
    """Each by a table of its own."""
    found = ask()
    assert found == expected and type(found) is type(expected)
