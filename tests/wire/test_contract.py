"""The example of the protocol, proto/examples/score.txt, is what the codec makes and takes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dlm.ngram.query import Answers, QueryGroups
from dlm.wire import codec
from models import packed

EXAMPLE = (Path(__file__).resolve().parents[2] / "proto/examples/score.txt").read_text()
SHARD_SET = bytes(range(16))


def example(name: str) -> bytes:
    """The bytes below a title that has the name, without the comments."""
    block = re.search(rf"^\w+ {name}\b.*\n\n((?:.+\n)*)", EXAMPLE, re.MULTILINE)
    assert block is not None
    lines = (re.match(r"\s*((?:[0-9a-f]{2} )+)", line) for line in block[1].splitlines())
    return bytes.fromhex("".join(line[1] for line in lines if line))


@pytest.mark.promise("worked_example")
def test_request_of_the_example_is_what_the_codec_writes_and_reads():
    """Byte for byte, in both directions."""
    groups = QueryGroups(
        np.array([2, 3], np.uint8),
        np.array([5, 6, 4, 5, 6], np.uint32),
        np.array([2, 1], np.uint32),
        np.array([7, 8, 2**32 - 1], np.uint32),
        np.array([10, 10], np.uint32),
    )
    data, checksum = codec.encode_score_request(SHARD_SET, 3, groups)
    assert data == example("ScoreRequest")
    assert len(data) == 89
    assert f"{checksum:016x}" in EXAMPLE
    request = codec.decode_score_request(example("ScoreRequest"), max_queries=3)
    assert (request.shard_set, request.shard) == (SHARD_SET, 3)
    assert request.groups.words.tolist() == [7, 8, 2**32 - 1]


def test_reply_of_the_example_is_what_the_codec_writes_and_reads():
    """Byte for byte, in both directions."""
    request = codec.decode_score_request(example("ScoreRequest"), max_queries=3)
    answers = Answers(
        np.array([-0.5, -0.25, -0.375], np.float32),
        np.array([3, 0, 0], np.uint8),
        np.array([3, 3, 0], np.uint8),
        np.array([3, 0, 0], np.uint8),
    )
    assert codec.encode_score_reply(request, packed(answers)) == example("ScoreReply")
    assert len(example("ScoreReply")) == 58
    found = codec.decode_score_reply(
        example("ScoreReply"),
        shard_set=SHARD_SET,
        shard=3,
        queries=3,
        request_checksum=request.checksum,
    )
    assert found.log10_prob.tolist() == [-0.5, -0.25, -0.375]
