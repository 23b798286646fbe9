"""The two kinds of message to a shard: for scores of words, and for all words after contexts. They
differ in how requests and replies are encoded, and in the method that sends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlm.client.deliver.transport import Connection, Post
from dlm.index.layout import Manifest
from dlm.ngram.query import Answers, QueryGroups
from dlm.wire import codec


class Asks(Protocol):
    """A kind of message. Each kind has its own lanes, by `name`."""

    name: str

    def encode(self, manifest: Manifest, shard: int, groups: QueryGroups) -> tuple[bytes, int]:
        """The encoded request for `groups`, and its checksum."""

    def decode(
        self, data: bytes, manifest: Manifest, shard: int, groups: QueryGroups, checksum: int
    ) -> Any:
        """The answers in a reply; raises `ProtocolError` if it cannot be one."""

    def post(self, connection: Connection) -> Post:
        """The method that sends such bytes."""


class ScoreAsks:
    """Scores of words after contexts; answered by `Answers`."""

    name = "scores"

    def encode(self, manifest: Manifest, shard: int, groups: QueryGroups) -> tuple[bytes, int]:
        return codec.encode_score_request(manifest.shard_set_bytes, shard, groups)

    def decode(
        self, data: bytes, manifest: Manifest, shard: int, groups: QueryGroups, checksum: int
    ) -> Answers:
        answers = codec.decode_score_reply(
            data,
            shard_set=manifest.shard_set_bytes,
            shard=shard,
            queries=len(groups.words),
            request_checksum=checksum,
        )
        codec.check_answers(answers, groups, manifest.order)
        return answers

    def post(self, connection: Connection) -> Post:
        return connection.score


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A reply's content for one context, or a part of it: how many words are stored after it in
    all; and, as in `StoredWords`, log10_backoffs (L - 1,), ranks (n,) and their answers."""

    total: int
    log10_backoffs: NDArray[np.float32]
    ranks: NDArray[np.uint32]
    answers: Answers


class BlockAsks:
    """All words stored after contexts; answered by one `BlockPart` per context. A context is
    requested like a word, with the number of words already received as its id."""

    name = "blocks"

    def encode(self, manifest: Manifest, shard: int, groups: QueryGroups) -> tuple[bytes, int]:
        lengths, words = _each(groups)
        assert groups.pairs is not None
        pairs = np.repeat(groups.pairs, groups.word_counts)
        return codec.encode_block_request(
            manifest.shard_set_bytes, shard, lengths, words, pairs, groups.words
        )

    def decode(
        self, data: bytes, manifest: Manifest, shard: int, groups: QueryGroups, checksum: int
    ) -> list[BlockPart]:
        lengths, _ = _each(groups)
        stored = codec.decode_block_reply(
            data,
            shard_set=manifest.shard_set_bytes,
            shard=shard,
            context_lengths=lengths,
            skips=groups.words,
            request_checksum=checksum,
            order=manifest.order,
            vocabulary_size=manifest.vocabulary_size,
        )
        parts, a = [], stored.answers
        word_end, weight_end = 0, 0
        rows = (stored.totals.tolist(), stored.counts.tolist(), lengths.tolist())
        for total, count, length in zip(*rows, strict=True):
            here = slice(word_end, word_end + count)
            weights = stored.log10_backoffs[weight_end : weight_end + length - 1]
            answers = Answers(
                a.log10_prob[here],
                a.matched_order[here],
                a.ngram_length[here],
                a.state_length[here],
            )
            parts.append(BlockPart(total, weights, stored.ranks[here], answers))
            word_end, weight_end = word_end + count, weight_end + length - 1
        return parts

    def post(self, connection: Connection) -> Post:
        return connection.context_block


SCORES, BLOCKS = ScoreAsks(), BlockAsks()


def _each(groups: QueryGroups) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    if (groups.word_counts == 1).all():
        return groups.context_lengths, groups.context_words
    lengths = groups.context_lengths.astype(np.int64)
    begins = np.repeat(np.cumsum(lengths) - lengths, groups.word_counts)
    repeated = np.repeat(groups.context_lengths, groups.word_counts)
    before = np.cumsum(repeated, dtype=np.int64) - repeated
    places = np.repeat(begins - before, repeated) + np.arange(int(repeated.sum(dtype=np.int64)))
    return repeated, groups.context_words[places]
