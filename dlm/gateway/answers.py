"""Answers requests: maps each call of dlm.v1.LanguageModel to the client. This module does not know
the protocols: gRPC and HTTP pass a message, and get the bytes of a reply or a `Refusal`."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlm.asr.rescoring.lattice import Scales
from dlm.asr.rescoring.nbest import Hypothesis
from dlm.client import AsyncClient, AsyncUtterance, Extension, Phrases, States
from dlm.client.inputs import shards_of
from dlm.client.phrases import split_words
from dlm.client.states import MODEL_BYTES, SentenceScore, state_head
from dlm.errors import ConfigError, QueryError, StaleShardSet
from dlm.gateway import kernels
from dlm.gateway.config import GatewayConfig
from dlm.gateway.kernels import CHECKSUM_BYTES
from dlm.gateway.metrics import GatewayMetrics, traffic
from dlm.server.admission import NOT_NAMED, looks
from dlm.server.refusals import Refusal
from dlm.server.security import may_ask, token_name
from dlm.units import LN_10
from dlm.wire._pb import lm_pb2 as pb
from dlm.wire.status import Reason

SERVICE = "dlm.v1.LanguageModel"
# Number of models whose states are accepted: the current, the previous, and the local fallback.
MODELS_KEPT = 3
DEFAULT_COUNT = 10  # number of words that NextWords returns by default
PAUSE = 128  # number of sentences or words written to a reply before other calls get a turn


T = TypeVar("T")
Left: TypeAlias = Callable[[], float]
# Takes a function to run in a thread, the number of bytes that it reads, and the seconds left.
Aside: TypeAlias = Callable[[Callable[[], Any], int, float], Awaitable[Any]]
SENTENCES_AT_ONCE = 256
LENGTH_DELIMITED = 2  # the wire type of bytes, strings, messages and packed lists
_FIELDS = pb.ExtendReply.DESCRIPTOR.fields_by_name


class LanguageModel:
    """Answers the calls of the service with one client, within the seconds left; `held` is closed
    once the reply is written.

    Raises, in each call
        Refusal                        if the request breaks a rule of the contract
        QueryError, UnavailableError, ProtocolError  from the client
    """

    def __init__(
        self,
        client: AsyncClient,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        aside: Aside,
    ) -> None:
        self.client = client
        self._config = config
        self._metrics = metrics
        self._phrases = PhraseStore(config.max_phrases_bytes, aside)
        self._pinned: OrderedDict[bytes, AsyncUtterance] = OrderedDict()

    async def score(
        self, request: pb.SentencesRequest, left: Left, held: ExitStack
    ) -> tuple[bytes, int]:
        """Returns a SentencesReply, and the number of scored words."""
        if request.sentences and request.ids:
            raise _malformed("sentences and ids are both given; expected only one of the two")
        self._check_count(len(request.sentences) + len(request.ids), "sentences")
        sentences: list[Any] = [split_words(one) for one in request.sentences]
        sentences += [np.array(one.ids, np.uint32) for one in request.ids]
        bos = request.bos if request.HasField("bos") else True
        eos = request.eos if request.HasField("eos") else True
        self._check_count(sum(map(len, sentences)) + eos * len(sentences), "words")
        utterance = await self._fresh(request, left, held)
        scores = await _scores(utterance, sentences, left, bos, eos)
        info = utterance.model_info
        reply = pb.SentencesReply(model=info.model, phrases_id=info.phrases)
        routes = [np.zeros(0, np.int32)] * len(scores)
        if request.with_shards and scores:
            routes = shards_of(utterance, sentences, bos=bos, eos=eos)
        for at, (one, shards) in enumerate(zip(scores, routes, strict=True), 1):
            reply.scores.add(
                log10_prob=one.log10_prob,
                oovs=one.oovs,
                log10_oovs=one.log10_oovs,
                log10_probs=one.token_log10_prob.tolist(),
                matched_orders=one.token_matched_order.tolist(),
                oov=one.token_oov.tolist(),
                sources=self._sources(one.token_source),
                bonus=one.bonus,
                shards=(shards + 1).tolist(),
            )
            if at % PAUSE == 0:
                await looks()
        return reply.SerializeToString(), sum(one.tokens for one in scores)

    async def extend(
        self, request: pb.ExtendRequest, left: Left, held: ExitStack
    ) -> tuple[bytes, int]:
        """Returns an ExtendReply, and the number of scored words."""
        if request.words and request.word_ids:
            raise _malformed("words and word_ids are both given; expected only one of the two")
        count, rows = len(request.words or request.word_ids), max(len(request.states), 1)
        self._check_count(rows, "states")
        self._check_count(queries_of(request), "words")
        words: Any = list(request.words) or np.array(request.word_ids, np.uint32)
        if request.own_words:
            if count % rows:
                raise _malformed(
                    f"found {count} words for {rows} states; with own_words, expected the same "
                    "number of words for each state"
                )
            width = count // rows
            words = [words[at * width : (at + 1) * width] for at in range(rows)]
        utterance, states = await self._states(request.states, request, left, held)
        found = await utterance.extend(states, words, deadline_s=left())
        self._metrics.fallbacks += int(np.count_nonzero(found.source))
        model = utterance.model_info.model
        reply = extend_reply(found, model, states=not request.without_states)
        return reply, found.log10_prob.size

    async def next_words(
        self, request: pb.NextWordsRequest, left: Left, held: ExitStack
    ) -> tuple[bytes, int]:
        """Returns a NextWordsReply, and 1, since scoring the vocabulary counts as one word."""
        count = request.count or DEFAULT_COUNT
        self._check_count(count, "words")
        utterance, states = await self._states([request.state], request, left, held)
        if text := split_words(request.text):
            states = utterance.states_after([[*states.contexts()[0], *text]])
        found = await utterance.next_words(states[0], count, deadline_s=left())
        words = utterance.vocabulary.words
        reply = pb.NextWordsReply(model=utterance.model_info.model)
        for at, (word_id, log10_prob) in enumerate(found, 1):
            word = words[word_id].decode("utf-8", "replace")
            reply.words.add(word=word, id=word_id, log10_prob=log10_prob)
            if at % PAUSE == 0:
                await looks()
        return reply.SerializeToString(), 1

    async def rescore(
        self, request: pb.RescoreRequest, left: Left, held: ExitStack
    ) -> tuple[bytes, int]:
        """Returns a RescoreReply, and the number of scored words."""
        self._check_count(len(request.hypotheses), "hypotheses")
        given = (
            request.acoustic_scale if request.HasField("acoustic_scale") else 1.0,
            request.lm_scale if request.HasField("lm_scale") else 1.0,
            request.word_penalty,
        )
        if not all(map(math.isfinite, [*given, *(one.acoustic for one in request.hypotheses)])):
            raise _malformed("a scale or an acoustic score is not finite; expected finite numbers")
        scales = Scales(*given)
        sentences = [split_words(one.text) for one in request.hypotheses]
        self._check_count(sum(map(len, sentences)) + len(sentences), "words")
        utterance = await self._fresh(request, left, held)
        scores = await _scores(utterance, sentences, left)
        ranked = []
        for index, (one, words, score) in enumerate(
            zip(request.hypotheses, sentences, scores, strict=True)
        ):
            lm = score.log10_prob * LN_10
            texts = tuple(word.decode("utf-8", "replace") for word in words)
            bonus = score.bonus * LN_10
            total = Hypothesis(texts, one.acoustic, lm).total(scales) + bonus
            # Refuse a total too large, or nan from 0 times -inf; probability 0 rightly gives -inf.
            if not math.isfinite(total) and (math.isfinite(lm) or total != -math.inf):
                raise _malformed(
                    f"the total of hypothesis {index} is {total}; expected scales and acoustic "
                    "scores with a finite total"
                )
            fallback = bool(self._sources(score.token_source))
            ranked.append(
                pb.Rescored(index=index, total=total, lm=lm, fallback=fallback, bonus=bonus)
            )
            if index % PAUSE == PAUSE - 1:
                await looks()
        ranked.sort(key=lambda one: -one.total)
        info = utterance.model_info
        reply = pb.RescoreReply(hypotheses=ranked, model=info.model, phrases_id=info.phrases)
        return reply.SerializeToString(), sum(one.tokens for one in scores)

    async def models(
        self, request: pb.ModelsRequest, left: Left, held: ExitStack
    ) -> tuple[bytes, int]:
        utterance = _open_to_caller(self.client.utterance())
        info, words = utterance.model_info, utterance.vocabulary
        begin, null = sealed(utterance.states([utterance.begin(), utterance.null()]))
        reply = pb.ModelsReply()
        reply.models.add(
            model=info.model,
            shard_set=info.shard_set,
            kind=info.kind,
            order=utterance.order,
            counts=utterance.manifest.counts,
            vocabulary_size=utterance.vocabulary_size,
            bos_id=words.begin_id,
            eos_id=words.end_id,
            begin_state=begin.tobytes(),
            null_state=null.tobytes(),
        )
        try:
            servers = self.client.cascade.servers
        except ConfigError:  # heartbeats are off, or the shard set is in this process
            servers = ()
        # The cluster may not have answered yet, and waiting for it would block the loop.
        shards = max((one.shard + 1 for one in servers), default=utterance.manifest.shards)
        reply.traffic.CopyFrom(traffic(self._metrics, self.client, shards))
        for one in servers:
            delay_ms = 1000 * one.delay_s if one.delay_s is not None else 0.0
            reply.servers.add(
                shard=one.shard, state=str(one.health), ready=one.ready, delay_ms=delay_ms
            )
        return reply.SerializeToString(), 0

    # ------------------------------------------------------------------ states

    async def _fresh(self, request: Any, left: Left, held: ExitStack) -> AsyncUtterance:
        utterance = _open_to_caller(self.client.utterance())
        phrases = await self._phrases.of(request, utterance.vocabulary_size, left, held)
        return utterance if phrases is None else utterance.with_phrases(phrases)

    async def _states(
        self, packed: Sequence[bytes], request: Any, left: Left, held: ExitStack
    ) -> tuple[AsyncUtterance, States]:
        """Returns an utterance on the model of the request's states, with the request's phrases;
        and the states, which must all be of one model."""
        given = iter(opened([one for one in packed if one]))
        packed = [one and next(given) for one in packed]
        first = next((one for one in packed if one), b"")
        utterance = self._utterance(first[1 : 1 + MODEL_BYTES])
        if request.HasField("phrases"):
            phrases = await self._phrases.of(request, utterance.vocabulary_size, left, held)
            utterance = utterance.with_phrases(phrases)
        if not first:
            return utterance, utterance.states([utterance.begin()] * max(len(packed), 1))
        if b"" in packed:
            (begin,) = utterance.states([utterance.begin()]).to_bytes()
            packed = [one or begin for one in packed]
        return utterance, utterance.states_from_bytes(packed)

    def _utterance(self, model: bytes) -> AsyncUtterance:
        """Returns an utterance that stays on the model whose id begins with these bytes; b"" means
        the current model."""
        known = self._pin(self.client.utterance())
        if len(model) == MODEL_BYTES and model not in self._pinned:
            # Another gateway may have got the new model of a roll-out before this one did.
            with contextlib.suppress(StaleShardSet):
                self._pin(self.client.utterance(model=model.hex()))
        found = self._pinned.get(model or known)
        if found is None:
            raise Refusal(
                Reason.WRONG_SHARD_SET,
                "the states belong to a model that this gateway does not use; start the sentence "
                "again on this gateway, without states",
            )
        return _open_to_caller(found)

    def _pin(self, fresh: AsyncUtterance) -> bytes:
        """Keeps an utterance, unless one on the same model and shard set is already kept; returns
        the beginning of the model's id."""
        known = bytes.fromhex(fresh.model_info.model)[:MODEL_BYTES]
        kept = self._pinned.get(known)
        if kept is None or kept.model_info != fresh.model_info:  # the model or its sharding is new
            _ = fresh.vocabulary  # fixes the utterance to its model
            self._pinned[known] = fresh
            if len(self._pinned) > MODELS_KEPT:
                self._pinned.popitem(last=False)
        self._pinned.move_to_end(known)
        return known

    def _sources(self, source: NDArray[np.uint8]) -> list[Any]:
        """Returns `source` as a list of numbers, which are those of `Source`; [] if all are FULL.
        Counts the answers of fallbacks."""
        fallbacks = int(np.count_nonzero(source))
        self._metrics.fallbacks += fallbacks
        return source.tolist() if fallbacks else []

    # ------------------------------------------------------------------ limits

    def _check_count(self, count: int, what: str) -> None:
        config = self._config
        most = config.max_queries if what == "words" else config.max_sentences
        if count > most:
            raise Refusal(
                Reason.TOO_MANY_QUERIES,
                f"the call has {count} {what}; expected at most {most}. Split it into several "
                "calls",
            )


@dataclass(slots=True)
class _Kept:
    phrases: Phrases
    size: int  # bytes
    calls: int = 0  # number of calls that use the phrases now

    def end(self) -> None:
        self.calls -= 1


class PhraseStore:
    """Keeps, for later calls, as many of the callers' phrases as fit, by id; logs no phrases. Runs
    on the event loop.

    A client that guesses a list of phrases knows the list's id, but must not learn whether another
    client sent it, so each token finds only its own lists.

    Args  max_bytes  limit of all lists together; a single list is kept even if it is larger
    """

    def __init__(self, max_bytes: int, aside: Aside) -> None:
        self._max_bytes, self._aside = max_bytes, aside
        # Phrases are kept by the token's name and their id; the most recently used come last.
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self.bytes = 0

    async def of(
        self, request: Any, vocabulary_size: int, left: Left, held: ExitStack
    ) -> Phrases | None:
        """Returns the phrases of a request, or None if it has none. They are read within the
        seconds left, and kept until `held` is closed. Raises Refusal if the id is unknown, memory
        is short, or time is up; and QueryError, as `Phrases` does."""
        kept = await self._find(request.phrases, vocabulary_size, left)
        if kept is None:
            return None
        kept.calls += 1
        held.callback(kept.end)
        return kept.phrases

    async def _find(self, given: Any, vocabulary_size: int, left: Left) -> _Kept | None:
        if given.id and given.phrases:
            raise Refusal(
                Reason.MALFORMED, "phrases and phrases_id were both given; give only one of the two"
            )
        if given.id:
            return self._known(given.id)
        if not given.phrases:
            return None
        weights = {one.text: one.bonus for one in given.phrases}
        if len(weights) < len(given.phrases):
            raise Refusal(Reason.MALFORMED, "a phrase was given twice; give each phrase once")
        # While phrases are read, they take many times the size of their message.
        size = given.ByteSize()
        found = await self._aside(lambda: Phrases(weights), size, left())
        return self._keep(found, found.memory_bytes(vocabulary_size))

    def _known(self, digest: str) -> _Kept:
        key = token_name(), digest
        if key not in self._kept:
            raise Refusal(
                Reason.PHRASES_UNKNOWN,
                "this gateway does not know the phrases of this id, or no longer knows them; send "
                "the phrases instead of the id",
            )
        self._kept.move_to_end(key)
        return self._kept[key]

    def _keep(self, phrases: Phrases, size: int) -> _Kept:
        key = token_name(), phrases.digest
        if key in self._kept:
            return self._known(phrases.digest)
        unused = [other for other, kept in self._kept.items() if not kept.calls]
        while unused and self.bytes + size > self._max_bytes:
            self.bytes -= self._kept.pop(unused.pop(0)).size
        if self._kept and self.bytes + size > self._max_bytes:
            raise Refusal(
                Reason.OVERLOADED,
                f"the phrases take {size:,} bytes, but phrases of other calls in flight leave too "
                f"little of the limit of {self._max_bytes:,} bytes. Ask another gateway, or retry "
                "later; the operator can raise max_phrases_bytes",
            )
        self.bytes += size
        self._kept[key] = kept = _Kept(phrases, size)
        return kept


def queries_of(request: pb.ExtendRequest) -> int:
    count = len(request.words or request.word_ids)
    return count if request.own_words else count * max(len(request.states), 1)


def _open_to_caller(utterance: AsyncUtterance) -> AsyncUtterance:
    """Returns `utterance`; raises `Refusal` if this call's token may not use the model."""
    info = utterance.model_info
    if may_ask(info.model, info.shard_set):
        return utterance
    raise Refusal(Reason.UNAUTHENTICATED, NOT_NAMED)


async def _scores(
    utterance: AsyncUtterance, sentences: list[Any], left: Left, bos: bool = True, eos: bool = True
) -> list[SentenceScore]:
    """Scores sentences in portions, since the client gives the event loop a turn only after
    thousands of words."""
    found: list[SentenceScore] = []
    for at in range(0, len(sentences), SENTENCES_AT_ONCE):
        some = sentences[at : at + SENTENCES_AT_ONCE]
        if found:
            await looks()
        found += await utterance.score_sentences(some, bos=bos, eos=eos, deadline_s=left())
    return found


def _malformed(message: str) -> Refusal:
    return Refusal(Reason.MALFORMED, message)


def extend_reply(found: Extension, model: str, *, states: bool) -> bytes:
    """Encodes an ExtendReply from arrays, since protobuf objects would cost more than scoring. A
    packed list of floats, or of small integers (a byte each), has the same bytes as its array."""
    parts = [
        _field("log10_probs", found.log10_prob.astype("<f4", copy=False).tobytes()),
        _field("matched_orders", found.matched_order.tobytes()),
        sealed(found.states, "states").data if states else b"",
        _field("oov", found.oov.tobytes()),
        _field("sources", found.source.tobytes() if found.source.any() else b""),
        _field("model", model.encode()),
    ]
    if found.bonus is not None:
        parts.append(_field("bonuses", found.bonus.astype("<f4", copy=False).tobytes()))
        parts.append(_field("phrases_id", found.states.model_info.phrases.encode()))
    return b"".join(parts)


def sealed(states: States, field: str = "") -> NDArray[np.uint8]:
    """Returns rows with the bytes of `States.to_bytes` and a checksum, as callers get them. If a
    `field` is given, each row begins with the head of that field of an ExtendReply."""
    flat = states.reshape(-1)
    head, at = state_head(flat.model_info)
    count, width = flat._contexts.shape
    size = at + 1 + 4 * width + CHECKSUM_BYTES
    start = _head(field, size) if field else b""
    nodes = np.zeros((count, 0), np.uint8)
    if flat._nodes is not None:
        nodes = np.ascontiguousarray(flat._nodes, "<i4").view(np.uint8).reshape(count, 4)
    contexts = np.ascontiguousarray(flat._contexts, "<u4").view(np.uint8)
    out = np.empty((count, len(start) + size), np.uint8)
    kernels.write_states(
        np.frombuffer(start + head, np.uint8),
        len(start),
        nodes,
        np.ascontiguousarray(flat._lengths),
        contexts,
        out,
    )
    return out


def opened(states: Sequence[bytes]) -> list[bytes]:
    """Removes the checksums that `sealed` added; raises QueryError for bytes not from `sealed`."""
    if not states:
        return []
    size = max(*map(len, states), CHECKSUM_BYTES + 1)
    wrong = next((at for at, one in enumerate(states) if len(one) < size), -1)
    if wrong < 0:
        rows = np.frombuffer(b"".join(states), np.uint8).reshape(len(states), size)
        wrong = kernels.changed_state(rows)
    if wrong >= 0:
        raise QueryError(
            f"states[{wrong}] is not a state, or was changed in transit; expected the bytes that a "
            "gateway returned"
        )
    return [one[:-CHECKSUM_BYTES] for one in states]


def _head(name: str, size: int) -> bytes:
    return _varint(_FIELDS[name].number << 3 | LENGTH_DELIMITED) + _varint(size)


def _field(name: str, content: bytes) -> bytes:
    return _head(name, len(content)) + content if content else b""


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
