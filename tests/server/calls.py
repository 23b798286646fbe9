"""Raw calls to a shard server, what they ask and how they end; and a shard that waits."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from cluster import WAIT_S, until
from dlm.client.cluster_file import Metadata, certificates_of, read_token
from dlm.client.config import ClientSecurity
from dlm.index.packed.low import BLANK, STATE_LENGTH, STORED, key_bits_of, mirrored
from dlm.index.search.shard import FoundBlocks, LowOrders
from dlm.ngram.backoff import DictModel, Score
from dlm.ngram.kernels import NO_RANK
from dlm.ngram.partition import slots_of
from dlm.ngram.query import Answers, QueryGroups, StoredWords
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason, reason_of
from http2 import Peer


def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and text of what HTTP answers on a port of metrics."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class GatedShard:
    """A shard whose kernel waits at a gate, so that a test decides what is in flight."""

    def __init__(self, shard: Any) -> None:
        self._shard = shard
        self.directory, self.index = shard.directory, shard.index
        self.manifest, self.order = shard.manifest, shard.order
        self.vocabulary_size = shard.vocabulary_size
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)  # one for each call that has reached the gate
        self.calls = 0
        self.fault: Exception | None = None

    def hold(self) -> None:
        """Closes the gate; what the warm-up counted is forgotten."""
        while self.entered.acquire(blocking=False):
            pass
        self.gate.clear()

    def score_owned(self, *asked: Any) -> Any:
        """As the real one, after the gate; raises `fault` where one is set."""
        self._pass()
        return self._shard.score_owned(*asked)

    def stored_words(self, *asked: Any) -> StoredWords:
        """Likewise."""
        self._pass()
        return self._shard.stored_words(*asked)

    def find_blocks(self, *asked: Any) -> FoundBlocks:
        """As the real one, without waiting."""
        return self._shard.find_blocks(*asked)

    def _pass(self) -> None:
        self.calls += 1
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault


@dataclass
class Outcome:
    """How a call ended."""

    code: grpc.StatusCode
    reason: Reason | None
    details: str
    data: bytes


class Carrying:
    """A channel, or a method of it, whose calls carry these metadata."""

    def __init__(self, inner: Any, metadata: Metadata) -> None:
        self._inner, self._metadata = inner, metadata

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in ("future", "with_call"):
            return Carrying(found, self._metadata)
        if name.startswith(("unary_", "stream_")):
            return lambda *args, **more: Carrying(found(*args, **more), self._metadata)
        return found

    def __call__(self, *args: Any, metadata: Any = (), **more: Any) -> Any:
        return self._inner(*args, metadata=(*(metadata or ()), *self._metadata), **more)


def open_channel(address: str, options: dict[str, int], security: ClientSecurity) -> Any:
    """A channel with the certificates and the token of a client."""
    certificates, token = certificates_of(security), read_token(security)
    given = tuple(options.items())
    if certificates is None:
        channel = grpc.insecure_channel(address, options=given)
    else:
        credentials = grpc.ssl_channel_credentials(*certificates())
        channel = grpc.secure_channel(address, credentials, options=given)
    return channel if token is None else Carrying(channel, token())


class Caller:
    """Raw calls to one server."""

    def __init__(self, address: str) -> None:
        # A pool of its own: a connection of its own, which may reach another process.
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=options)
        name = "/dlm.v1.Shard/"
        self.score = self.channel.unary_unary(name + "Score")
        self.context_block = self.channel.unary_unary(name + "ContextBlock")
        self.describe = self.channel.unary_unary(name + "Describe")
        self.heartbeat = self.channel.unary_unary(name + "Heartbeat")
        self.download = self.channel.unary_stream(name + "Download")

    def close(self) -> None:
        """Closes the connection."""
        self.channel.close()

    def beat(self, **fields: Any) -> pb.HeartbeatReply:
        """A heartbeat, its checksum checked."""
        request = pb.HeartbeatRequest(**fields)
        reply = pb.HeartbeatReply.FromString(
            self.heartbeat(request.SerializeToString(), timeout=WAIT_S)
        )
        assert reply.checksum == codec.heartbeat_checksum(reply)
        return reply


class Stream:
    """One Exchange: what is put goes out, `take` gives the next reply."""

    def __init__(self, caller: Caller) -> None:
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        self.call: Any = caller.channel.stream_stream("/dlm.v1.Shard/Exchange")(
            iter(self._out.get, None), timeout=WAIT_S
        )

    def put(self, data: bytes, sequence: int, timeout_us: int = 0, sent_us: int = 0) -> None:
        """Sends an encoded ScoreRequest."""
        self._out.put(data + codec.exchange_tail(sequence, timeout_us, sent_us))

    def put_bytes(self, data: bytes) -> None:
        """Sends whatever it is."""
        self._out.put(data)

    def take(self) -> tuple[pb.ScoreReply, bytes]:
        """The next reply, parsed and as it came."""
        data = next(self.call)
        return pb.ScoreReply.FromString(data), data

    def end(self) -> None:
        """Sends no more."""
        self._out.put(None)


def unread_reply(sharded: Any, server: Any, metadata: Metadata = ()) -> tuple[Peer, Asked]:
    """A stream whose second reply waits to be read, in one operation with the next read."""
    metrics = server.server.service.metrics
    asked = sharded.questions.ask(np.random.default_rng(2), 0)
    peer = Peer(server.address, window=10 * len(asked.queries))  # a query of a reply takes 7
    peer.ask("/dlm.v1.Shard/Exchange", asked.data, metadata, end=False)
    until(lambda: metrics.write_s.count == 1)
    peer.ask_more(asked.data)
    until(lambda: metrics.messages == 2)
    assert (metrics.in_flight, metrics.write_s.count) == (0, 1)
    return peer, asked


def outcome(call: Callable[..., Any], data: bytes, timeout: float = WAIT_S) -> Outcome:
    """What `call` gives for `data`."""
    return outcome_of(call.future(data, timeout=timeout))  # type: ignore[attr-defined]


def outcome_of(future: Any) -> Outcome:
    """How a call in flight ended, once it has."""
    try:
        return Outcome(grpc.StatusCode.OK, None, "", future.result())
    except grpc.RpcError as error:
        return Outcome(error.code(), reason_of(error), error.details() or "", b"")


@dataclass
class Asked:
    """A request: its queries, its bytes and its checksum."""

    queries: list[tuple[tuple[int, ...], int | None]]
    data: bytes
    checksum: int


class Questions:
    """Random queries for the shards of one shard set, and the oracle that knows the answers."""

    def __init__(self, directory: Path, manifest: Any, oracle: DictModel) -> None:
        self.manifest = manifest
        self.oracle = oracle
        self.order = manifest.order
        self.size = manifest.vocabulary_size
        self.low = low = LowOrders.open(directory, manifest).plain()
        first = np.repeat(np.arange(self.size), np.diff(low.begin))
        second = mirrored(low.key, key_bits_of(self.size))
        pairs = list(zip(first.tolist(), second.tolist(), strict=True))
        self.numbers = {pair: number for number, pair in enumerate(pairs)}
        self.ranks = {pair: n - int(low.begin[pair[0]]) for pair, n in self.numbers.items()}
        self.stored = {p: n for p, n in self.numbers.items() if low.pair_flags[n] & STORED}
        self._contexts = sorted(
            {n[:-1] for n in oracle.ngrams if len(n) > 2 and n[-3:-1] in self.stored}
        )

    def owner(self, context: tuple[int, ...]) -> int:
        """The shard that a context belongs to."""
        u, v = (np.array([i], np.uint32) for i in context[-2:])
        return int(self.manifest.slots[slots_of(u, v)[0]])

    def contexts(self, rng: np.random.Generator, shard: int, count: int) -> list[tuple[int, ...]]:
        """Contexts of `shard` under which something is stored: half from the model, half random."""
        found: list[tuple[int, ...]] = []
        roots = sorted(self.stored)
        while len(found) < count:
            if rng.random() < 0.5:
                context = self._contexts[rng.integers(len(self._contexts))]
                room = self.order - 1 - len(context)
            else:
                context = roots[rng.integers(len(roots))]
                room = self.order - 3
            more = rng.integers(0, self.size, rng.integers(0, room + 1)).tolist()
            context = (*more, *context)
            if self.owner(context) == shard:
                found.append(context)
        return found

    def pack(self, groups: list[tuple[tuple[int, ...], list[int]]]) -> QueryGroups:
        """(context, words) pairs as a shard is asked; the number 0 where nothing is stored."""
        ranked = [(c, [self.ranks.get((c[-1], i), NO_RANK) for i in w]) for c, w in groups]
        pairs = np.array([self.stored.get(c[-2:], 0) for c, _ in groups], np.uint32)
        return replace(pack(ranked), pairs=pairs)

    def ask(self, rng: np.random.Generator, shard: int, contexts: int = 20) -> Asked:
        """A request for `shard`."""
        asked = [
            (c, rng.integers(0, self.size, rng.integers(1, 6)).tolist())
            for c in self.contexts(rng, shard, contexts)
        ]
        data, checksum = codec.encode_score_request(
            self.manifest.shard_set_bytes, shard, self.pack(asked)
        )
        return Asked([(c, w) for c, words in asked for w in words], data, checksum)

    def verify(self, shard: int, asked: Asked, reply: bytes) -> None:
        """Fails unless `reply` with the low orders is the oracle's answers, bit for bit."""
        answers = codec.decode_score_reply(
            reply,
            shard_set=self.manifest.shard_set_bytes,
            shard=shard,
            queries=len(asked.queries),
            request_checksum=asked.checksum,
        )
        self.compare(asked.queries, answers)

    def completed(self, context: tuple[int, ...], word: int, answer: Score) -> Score:
        """A shard's answer with that of the low orders: proto/README.md, "Score"."""
        low, prob, matched = self.low, answer.log10_prob, answer.matched_order
        number = self.numbers.get((context[-1], word))
        flags = None if number is None else int(low.pair_flags[number])
        if matched == 0:
            matched = 1 if flags is None or flags & BLANK else 2
            if matched == 2:
                prob = np.float32(prob + low.pair_log10_prob[number])
            else:
                added = np.float32(prob + low.log10_backoff[context[-1]])
                prob = np.float32(added + low.log10_prob[word])
        of_low = (1, int(low.extended[word])) if flags is None else (2, flags & STATE_LENGTH)
        length, state = answer.ngram_length or of_low[0], answer.state_length or of_low[1]
        return Score(prob, matched, length, state)

    def compare(self, queries: list[tuple[tuple[int, ...], int | None]], answers: Answers) -> None:
        """Fails unless decoded answers, completed, are the oracle's; of those to words."""
        a = answers
        rows = zip(a.log10_prob, a.matched_order, a.ngram_length, a.state_length, strict=True)
        for (context, word), (prob, *rest) in zip(queries, rows, strict=True):
            if word is None:
                continue
            found = self.completed(context, word, Score(prob, *map(int, rest)))
            expected = self.oracle.score(context, word)
            assert found.log10_prob.tobytes() == expected.log10_prob.tobytes(), (context, word)
            assert found == expected, (context, word)


def pack(groups: list[tuple[tuple[int, ...], list[int]]]) -> QueryGroups:
    """(context, words) pairs as arrays; the last word stands for the 2-gram of a context."""
    return QueryGroups(
        np.array([len(c) for c, _ in groups], np.uint8),
        np.array([i for c, _ in groups for i in c], np.uint32),
        np.array([len(w) for _, w in groups], np.uint32),
        np.array([i for _, w in groups for i in w], np.uint32),
        np.array([c[-1] if c else 0 for c, _ in groups], np.uint32),
    )


def seal(message: pb.ScoreRequest) -> bytes:
    """The message with the checksum that its content gives, whatever the content."""
    message.checksum = codec.checksum(
        message.shard_set,
        message.shard.to_bytes(4, "little"),
        message.context_lengths,
        message.context_words,
        message.pairs,
        message.word_counts,
        message.words,
    )
    return message.SerializeToString()
