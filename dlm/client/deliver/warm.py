"""Compiles everything that a call needs, before any call has a deadline: on a new machine, numba's
compilation takes tens of seconds, while calls have two. So a client that connects first makes a
small call through every function that a real one uses, and does the server's part itself."""

from __future__ import annotations

from math import inf

import numpy as np

from dlm.client.deliver.asks import BLOCKS
from dlm.client.deliver.call import Call
from dlm.client.plan import kernels, phrase_kernels, router
from dlm.client.plan.lowgrams import LowGrams
from dlm.index.layout import Manifest
from dlm.index.search import blocks, shard
from dlm.ngram import kernels as text
from dlm.ngram.query import Answers, QueryGroups, StoredWords
from dlm.wire import codec
from dlm.wire import kernels as checks

CONTEXTS = 3

# The kernels of a client, with or without servers; see jit.compile_ahead.
KERNELS = (
    *shard.KERNELS,
    *blocks.KERNELS,
    kernels.plan,
    kernels.group_queries,
    kernels.repeats,
    kernels.regroup,
    kernels.regroup_large,
    kernels.route_groups,
    kernels.finish,
    kernels.are_word,
    kernels.next_states,
    phrase_kernels.fold_new,
    phrase_kernels.advance,
    phrase_kernels.walk,
    text.enter_words,
    text.find_words,
    checks.out_of_range,
    checks.block_fault,
    checks.totals,
)


def warm_up(grams: LowGrams) -> None:
    """Takes a call from queries to answers, through the codec: a kernel is compiled again for
    read-only arrays, as over received bytes."""
    manifest = grams.manifest
    width = manifest.order - 1
    contexts = np.zeros((CONTEXTS, width), np.uint32)
    lengths = np.full(CONTEXTS, width, np.uint8)
    counts = np.ones(CONTEXTS, np.uint32)
    words = np.arange(CONTEXTS, dtype=np.uint32) % np.uint32(manifest.vocabulary_size)
    plan = router.plan(grams, manifest, contexts, lengths, counts, words, len(words))
    call = Call(manifest.model, plan._replace(pieces=[]), inf, manifest.shard_set)
    if width >= 2:  # two words determine a shard
        groups = QueryGroups(lengths, contexts.reshape(-1), counts, words, words * np.uint32(0))
        pieces = router.route(groups, np.zeros_like(manifest.slots), 1, len(words))
        call = Call.of_pieces(manifest.model, pieces, inf, manifest.shard_set)
        router.gather([groups, groups])
        kernels.regroup_large(lengths, groups.context_words, words, counts, words)
        data, checksum = codec.encode_score_request(manifest.shard_set_bytes, 0, groups)
        queries = len(groups.words)
        request = codec.decode_score_request(data, max_queries=queries)
        zeros, none = np.zeros(queries, np.float32), np.zeros(queries, np.uint8)
        reply = codec.encode_score_reply(request, Answers(zeros, none, none, none))
        received = codec.decode_score_reply(
            reply,
            shard_set=manifest.shard_set_bytes,
            shard=0,
            queries=queries,
            request_checksum=checksum,
        )
        codec.check_answers(received, groups, manifest.order)
        call.answer(call.parts[0], received, slice(None))
        _warm_up_blocks(manifest, groups)
    else:
        call.end()
    result = call.result(0)
    kernels.next_states(contexts, counts, words, result.state_length)
    kernels.are_word(words, 0)
    block = blocks.ContextBlock.low_only(grams.low, contexts[0])
    block.score(words)
    block.score_word(0)
    block.score_all()


def _warm_up_blocks(manifest: Manifest, groups: QueryGroups) -> None:
    asked = QueryGroups(
        groups.context_lengths,
        groups.context_words,
        np.ones(len(groups.word_counts), np.uint32),
        np.zeros(len(groups.word_counts), np.uint32),
        groups.pairs,
    )
    data, checksum = BLOCKS.encode(manifest, 0, asked)
    request = codec.decode_block_request(data, max_queries=len(asked.words))
    weights = len(asked.context_words) - len(asked.context_lengths)
    nothing = StoredWords(
        asked.words, asked.words, np.zeros(weights, np.float32), asked.words[:0], Answers.empty(0)
    )
    BLOCKS.decode(codec.encode_block_reply(request, nothing), manifest, 0, asked, checksum)
