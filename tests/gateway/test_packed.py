"""dlm.gateway.answers: the bytes are those of the message."""

from __future__ import annotations

import numpy as np
import pytest

from dlm.client import Extension
from dlm.client.states import States, model_info_of
from dlm.errors import QueryError
from dlm.gateway.answers import extend_reply, opened, sealed
from dlm.ngram.query import BIGRAM_FALLBACK
from dlm.wire._pb import lm_pb2 as pb

MODEL = "ab" * 32


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (3, 50)])
@pytest.mark.parametrize("width", [1, 4, 40])
@pytest.mark.parametrize("source", [0, BIGRAM_FALLBACK])
def test_a_packed_reply_is_the_message(shape: tuple[int, int], width: int, source: int) -> None:
    """Of few and many values, with states of which the length takes one byte or two."""
    rng = np.random.default_rng(width)
    small = lambda high: rng.integers(0, high, shape).astype(np.uint8)  # noqa: E731
    contexts = rng.integers(0, 1 << 32, (*shape, width)).astype(np.uint32)
    states = States(model_info_of("full", MODEL, MODEL), contexts, small(width + 1))
    log10_prob = -rng.random(shape).astype(np.float32)
    oov = small(2).astype(bool)
    found = Extension(log10_prob, small(9), small(9), states, np.full(shape, source, np.uint8), oov)
    reply = pb.ExtendReply.FromString(extend_reply(found, MODEL, states=True))
    assert opened(reply.states) == states.to_bytes()
    del reply.states[:]
    assert reply == pb.ExtendReply(
        log10_probs=log10_prob.ravel().tolist(),
        matched_orders=found.matched_order.ravel().tolist(),
        oov=oov.ravel().tolist(),
        sources=[source] * log10_prob.size if source else [],
        model=MODEL,
    )
    assert not pb.ExtendReply.FromString(extend_reply(found, MODEL, states=False)).states


@pytest.mark.parametrize("phrases", ["", "cd" * 32])
@pytest.mark.parametrize("width", [1, 4])
def test_no_changed_bit_of_a_state_passes(width: int, phrases: str) -> None:
    """Of its content or of its checksum; the others of a call pass as they are."""
    rng = np.random.default_rng(width)
    contexts = rng.integers(0, 1 << 32, (2, width)).astype(np.uint32)
    nodes = rng.integers(0, 1 << 31, 2).astype(np.int32) if phrases else None
    lengths = np.full(2, width, np.uint8)
    states = States(model_info_of("full", MODEL, MODEL, phrases), contexts, lengths, nodes)
    good = [row.tobytes() for row in sealed(states)]
    assert opened(good) == states.to_bytes()
    for bit in range(8 * len(good[0])):
        changed = bytearray(good[1])
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(QueryError, match=r"states\[1\]"):
            opened([good[0], bytes(changed)])
