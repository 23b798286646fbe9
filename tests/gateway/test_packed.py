"""dlm.gateway.answers: the bytes are those of the message."""

from __future__ import annotations

import numpy as np
import pytest

from dlm.client import Extension
from dlm.client.api.states import States, model_info_of
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
    assert reply == pb.ExtendReply(
        log10_probs=log10_prob.ravel().tolist(),
        matched_orders=found.matched_order.ravel().tolist(),
        states=[row.tobytes() for row in sealed(states.packed())],
        oov=oov.ravel().tolist(),
        sources=[source] * log10_prob.size if source else [],
        model=MODEL,
    )
    assert not pb.ExtendReply.FromString(extend_reply(found, MODEL, states=False)).states


@pytest.mark.parametrize("size", [14, 26, 37])
def test_no_changed_bit_of_a_state_passes(size: int) -> None:
    """Of its content or of its checksum; the others of a call pass as they are."""
    rows = np.random.default_rng(size).integers(0, 256, (2, size)).astype(np.uint8)
    good = [row.tobytes() for row in sealed(rows)]
    assert opened(good) == [row.tobytes() for row in rows]
    for bit in range(8 * len(good[0])):
        changed = bytearray(good[1])
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(QueryError, match=r"states\[1\]"):
            opened([good[0], bytes(changed)])
