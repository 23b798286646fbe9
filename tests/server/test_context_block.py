"""dlm.v1.Shard/ContextBlock over the wire: what is stored after contexts, or typed refusals."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from cluster import WAIT_S
from dlm.errors import UnknownCall
from dlm.ngram.query import Answers, StoredWords
from dlm.wire import codec
from dlm.wire.status import CODE_OF, Reason
from server.calls import Caller, Stream, outcome

OK = grpc.StatusCode.OK
Context = tuple[int, ...]


def request_for(
    sharded: SimpleNamespace, shard: int, contexts: list[Context], skips: list[int] | None = None
) -> tuple[bytes, int]:
    """The bytes of a request, and its checksum."""
    return codec.encode_block_request(
        sharded.manifest.shard_set_bytes,
        shard,
        np.array([len(c) for c in contexts], np.uint8),
        np.array([w for c in contexts for w in c], np.uint32),
        np.array([sharded.questions.stored.get(c[-2:], 0) for c in contexts], np.uint32),
        np.array(skips or [0] * len(contexts), np.uint32),
    )


def stored(
    sharded: SimpleNamespace,
    shard: int,
    caller: Caller,
    contexts: list[Context],
    skips: list[int] | None = None,
) -> StoredWords:
    """What the server says, checked as clients check it."""
    data, checksum = request_for(sharded, shard, contexts, skips)
    found = outcome(caller.context_block, data)
    assert found.code is OK, found
    return codec.decode_block_reply(
        found.data,
        shard_set=sharded.manifest.shard_set_bytes,
        shard=shard,
        context_lengths=np.array([len(c) for c in contexts], np.uint8),
        skips=np.array(skips or [0] * len(contexts), np.uint32),
        request_checksum=checksum,
        order=sharded.manifest.order,
        vocabulary_size=sharded.manifest.vocabulary_size,
    )


def verify(sharded: SimpleNamespace, contexts: list[Context], found: StoredWords) -> int:
    """Fails unless the words are those of the oracle and have its bits; how many there are."""
    oracle, ranks = sharded.questions.oracle, sharded.questions.ranks
    at = longer = 0
    for context, total, count in zip(
        contexts, found.totals.tolist(), found.counts.tolist(), strict=True
    ):
        after = [n[2] for n in oracle.closure if len(n) == 3 and n[:2] == context[-2:]]
        after.sort(key=lambda word: ranks[context[-1], word])
        assert (total, count) == (len(after), len(after))
        here, a = slice(at, at + count), found.answers
        assert found.ranks[here].tolist() == [ranks[context[-1], word] for word in after]
        columns = (a.log10_prob, a.matched_order, a.ngram_length, a.state_length)
        answers = Answers(*(column[here] for column in columns))
        sharded.questions.compare([(context, word) for word in after], answers)
        for k in range(2, len(context) + 1):
            _, log10_backoff = oracle.ngrams.get(context[-k:], (0.0, np.float32(0.0)))
            assert found.log10_backoffs[longer] == log10_backoff
            longer += 1
        at += count
    assert longer == len(found.log10_backoffs)
    return at


def test_every_word_stored_after_a_context_comes_with_the_oracles_bits(sharded, callers):
    """Contexts of each shard, of the model and of random words, and the weights of their ends."""
    rng = np.random.default_rng(1)
    words = 0
    for shard, caller in enumerate(callers):
        contexts = sharded.questions.contexts(rng, shard, 60)
        words += verify(sharded, contexts, stored(sharded, shard, caller, contexts))
    assert words > 50
    assert len(stored(sharded, 0, callers[0], []).ranks) == 0


def test_what_does_not_fit_in_a_reply_is_asked_again_by_skips(sharded, gated):
    """At most `max_queries` words come at once, and what is left is known."""
    _, server, caller = gated(max_queries=64)
    rng = np.random.default_rng(2)
    contexts = sharded.questions.contexts(rng, 0, 60)
    skips, came = [0] * len(contexts), 0
    while True:
        found = stored(sharded, 0, caller, contexts, skips)
        assert len(found.ranks) <= 64
        came += len(found.ranks)
        skips = [s + c for s, c in zip(skips, found.counts.tolist(), strict=True)]
        if skips == found.totals.tolist():
            break
    assert came == sum(skips) > 0
    load = server.server.service.metrics.slot_queries.total()  # words sent are queries answered
    assert load.sum() == came
    assert not load[sharded.manifest.slots != 0].any()


@pytest.mark.parametrize("inline_queries", [0, 2048])
def test_a_stream_carries_blocks_beside_scores(sharded, gated, inline_queries):
    """Each with the sequence of its message, on the loop and in threads; refusals, too."""
    _, _, caller = gated(inline_queries=inline_queries)
    rng = np.random.default_rng(8)
    contexts = sharded.questions.contexts(rng, 0, 20)
    data, _ = request_for(sharded, 0, contexts)
    whole = outcome(caller.context_block, data).data
    asked = sharded.questions.ask(rng, 0)
    stream = Stream(caller)
    stream.put(codec.carry_block_request(data), 1)
    stream.put(asked.data, 2)
    stream.put(codec.carry_block_request(request_for(sharded, 1, contexts)[0]), 3)
    stream.put(codec.carry_block_request(data), 4, timeout_us=1, sent_us=0)
    taken = [stream.take() for _ in range(4)]
    replies = {reply.sequence: (reply, data) for reply, data in taken}
    assert codec.carried_block_reply(replies[1][1]) == whole
    sharded.questions.verify(0, asked, replies[2][1])
    assert replies[3][0].reason == Reason.WRONG_SHARD
    codec.check_refusal(replies[3][0])
    assert replies[4][0].reason in (Reason.LATE, "")
    stream.end()


def test_score_as_a_call_carries_none(sharded, callers):
    """As a server answers that does not know the field: nothing was asked, and a client sees it."""
    contexts = sharded.questions.contexts(np.random.default_rng(9), 0, 2)
    found = outcome(
        callers[0].score, codec.carry_block_request(request_for(sharded, 0, contexts)[0])
    )
    assert found.code is OK
    with pytest.raises(UnknownCall):
        codec.carried_block_reply(found.data)


BAD = {
    "no message": (lambda s, c: b"\xff\xfe", Reason.MALFORMED),
    "shard set": (
        lambda s, c: codec.encode_block_request(
            bytes(16), 0, *(np.zeros(0, t) for t in (np.uint8, *3 * [np.uint32]))
        )[0],
        Reason.WRONG_SHARD_SET,
    ),
    "shard": (lambda s, c: request_for(s, 1, [c])[0], Reason.WRONG_SHARD),
    "one word": (lambda s, c: request_for(s, 0, [(1,)])[0], Reason.CONTEXT_LENGTH),
    "too long": (lambda s, c: request_for(s, 0, [(1, 1, *c[-2:])])[0], Reason.CONTEXT_LENGTH),
    "id": (lambda s, c: request_for(s, 0, [(10**6, *c[-2:])])[0], Reason.ID_OUT_OF_RANGE),
    "too many": (lambda s, c: request_for(s, 0, [c] * 65_537)[0], Reason.TOO_MANY_QUERIES),
    "slot of another": (
        lambda s, c: request_for(s, 0, s.questions.contexts(np.random.default_rng(4), 1, 1))[0],
        Reason.SLOT_NOT_OWNED,
    ),
    "flipped": (
        lambda s, c: request_for(s, 0, [c])[0].replace(b"\x32\x04\0\0\0\0", b"\x32\x04\1\0\0\0"),
        Reason.CHECKSUM,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_message_is_refused_with_its_reason(sharded, callers, name):
    """The code and the reason of the contract's table."""
    make, reason = BAD[name]
    (context,) = sharded.questions.contexts(np.random.default_rng(3), 0, 1)
    found = outcome(callers[0].context_block, make(sharded, context))
    assert (found.code, found.reason) == (CODE_OF[reason], reason)


def test_load_and_deadlines_are_those_of_scores(sharded, gated, asked):
    """A block in the kernel counts as in flight, and a late one is not begun."""
    now = [0.0, 0.0]  # the time, and how far it leaps at each look

    def clock() -> float:
        now[0] += now[1]
        return now[0]

    shard, server, caller = gated(clock=clock, max_in_flight=1, inline_queries=0)
    contexts = sharded.questions.contexts(np.random.default_rng(5), 0, 20)
    data, _ = request_for(sharded, 0, contexts)
    shard.hold()
    first = caller.context_block.future(data, timeout=WAIT_S)
    assert shard.entered.acquire(timeout=WAIT_S)
    assert outcome(caller.context_block, data).reason is Reason.OVERLOADED
    assert outcome(caller.score, asked.data).reason is Reason.OVERLOADED
    shard.gate.set()
    first.result()
    metrics = server.server.service.metrics
    assert (metrics.messages, metrics.blocks, metrics.in_flight) == (1, 20, 0)
    now[1] = 3600.0
    before = shard.calls
    assert outcome(caller.context_block, data).reason is Reason.LATE
    assert shard.calls == before
