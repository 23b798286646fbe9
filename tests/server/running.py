"""Real shard servers for tests: in a process of their own, or in a thread with a shard that waits.

Nothing here sleeps: a parent reads the line with which its child says that it is ready, and threads
wait on events.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from cluster import WAIT_S
from dlm.ngram.backoff import DictModel
from dlm.ngram.partition import slots_of
from dlm.ngram.query import Answers, QueryGroups
from dlm.server.app import ShardServer
from dlm.server.config import ServerConfig
from dlm.server.health import Event
from dlm.server.ready import Notice
from dlm.wire import codec
from dlm.wire._pb import shard_pb2 as pb
from dlm.wire.status import Reason, reason_of

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import json, logging, sys
from dataclasses import asdict
from pathlib import Path
from dlm.server.app import serve
from dlm.server.config import ServerConfig
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
directories, index, config, ready_file = json.loads(sys.argv[1])
sys.exit(serve(
    ServerConfig(**config), [Path(directory) for directory in directories], index,
    on_ready=lambda ready: print(json.dumps(asdict(ready)), flush=True),
    ready_file=Path(ready_file) if ready_file else None,
))
"""


class ServerProcess:
    """A shard server in processes of its own; `ready` holds what it said, once `wait_ready` ran.

    Args
        directory   of a shard set, or a list of them
        open_files  its limit of open files: soft and hard, or both in one
    """

    def __init__(
        self,
        directory: Path | list[Path],
        index: int,
        *,
        ready_file: Path | None = None,
        open_files: int | tuple[int, int] | None = None,
        **config: Any,
    ) -> None:
        directories = directory if isinstance(directory, list) else [directory]
        arguments = [
            list(map(str, directories)),
            index,
            config,
            str(ready_file) if ready_file else None,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if open_files is not None:  # long before it opens or raises anything
            both = open_files if isinstance(open_files, tuple) else (open_files, open_files)
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, both)
        self.ready: dict[str, Any] = {}
        self.errors = ""
        # Read all along, so that a child that logs much never waits for its parent.
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line.decode()

    def wait_ready(self) -> ServerProcess:
        """Returns once the first query can be answered."""
        assert self.process.stdout is not None
        waiting = select.poll()  # not select(), which takes descriptors below 1,024 only
        waiting.register(self.process.stdout, select.POLLIN)
        waiting.poll(WAIT_S * 1000)
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the server ended with {self.wait()}: {self.errors}")
        self.ready = json.loads(line)
        return self

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.ready['host']}:{self.ready['port']}"

    def wait(self) -> int:
        """The exit status, once it has ended."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def end(self) -> None:
        """Ends it, whatever it does, and closes its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


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

    def score(self, groups: QueryGroups) -> Answers:
        """As the real one, after the gate; raises `fault` where one is set."""
        self.calls += 1
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault
        return self._shard.score(groups)


class ThreadServer:
    """A `ShardServer` in a thread with its own loop.

    Args
        shard  an open one, or what stands in for it; or a list of them, of several models
    """

    def __init__(
        self, shard: Any, *, clock: Callable[[], float] | None = None, **config: Any
    ) -> None:
        self.server: ShardServer
        self._bound = threading.Event()
        self._ready = threading.Event()
        self.status: concurrent.futures.Future[int] = concurrent.futures.Future()

        async def main() -> int:
            more = {} if clock is None else {"clock": clock}
            shards = shard if isinstance(shard, list) else [shard]
            notice = Notice(lambda _: self._ready.set())
            self.server = ShardServer(ServerConfig(**config), shards, notice=notice, **more)
            self._bound.set()
            return await self.server.run()

        def run() -> None:
            try:
                self.status.set_result(asyncio.run(main()))
            except BaseException as exc:  # noqa: BLE001 - the test that waits gets it
                self.status.set_exception(exc)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert self._bound.wait(WAIT_S)

    def wait_ready(self) -> ThreadServer:
        """Returns once it is READY."""
        assert self._ready.wait(WAIT_S)
        return self

    @property
    def address(self) -> str:
        """host:port; waits until a port is bound."""
        return f"127.0.0.1:{self.server.port}"

    def post(self, event: Event) -> None:
        """Hands `event` to the server."""
        self.server.post(event)

    def end(self) -> None:
        """Stops it at once."""
        self.server.post(Event.STOP)
        self.server.post(Event.STOP)
        self.thread.join(WAIT_S)


@dataclass
class Outcome:
    """How a call ended."""

    code: grpc.StatusCode
    reason: Reason | None
    details: str
    data: bytes


class Caller:
    """Raw calls to one server."""

    def __init__(self, address: str) -> None:
        # A pool of its own: a connection of its own, which may reach another worker.
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=options)
        name = "/dlm.v1.Shard/"
        self.score = self.channel.unary_unary(name + "Score")
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


def forget(semaphore: threading.Semaphore) -> None:
    """Takes a semaphore down to 0: what the warm-up counted does not matter."""
    while semaphore.acquire(blocking=False):
        pass


def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds()` is true; looks again and again, and fails after a long while."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        os.sched_yield()


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

    queries: list[tuple[tuple[int, ...], int]]
    data: bytes
    checksum: int


class Questions:
    """Random queries for the shards of one shard set, and the oracle that knows the answers."""

    def __init__(self, manifest: Any, oracle: DictModel) -> None:
        self.manifest = manifest
        self.oracle = oracle
        self.order = manifest.order
        self.size = manifest.vocabulary_size
        self._contexts = sorted({n[:-1] for n in oracle.ngrams if len(n) > 2})

    def owner(self, context: tuple[int, ...]) -> int:
        """The shard that a context belongs to."""
        u, v = (np.array([i], np.uint32) for i in context[-2:])
        return int(self.manifest.slots[slots_of(u, v)[0]])

    def contexts(self, rng: np.random.Generator, shard: int, count: int) -> list[tuple[int, ...]]:
        """Contexts of `shard`: half from the model, half of random words, of every length."""
        found: list[tuple[int, ...]] = []
        while len(found) < count:
            if rng.random() < 0.5:
                context = self._contexts[rng.integers(len(self._contexts))]
                room = self.order - 1 - len(context)
                more = rng.integers(0, self.size, rng.integers(0, room + 1)).tolist()
                context = (*more, *context)
            else:
                length = int(rng.integers(2, self.order))
                context = tuple(rng.integers(0, self.size, length).tolist())
            if self.owner(context) == shard:
                found.append(context)
        return found

    def ask(self, rng: np.random.Generator, shard: int, contexts: int = 20) -> Asked:
        """A request for `shard`."""
        asked = [
            (c, rng.integers(0, self.size, rng.integers(1, 6)).tolist())
            for c in self.contexts(rng, shard, contexts)
        ]
        data, checksum = codec.encode_score_request(
            self.manifest.shard_set_bytes, shard, pack(asked)
        )
        return Asked([(c, w) for c, words in asked for w in words], data, checksum)

    def verify(self, shard: int, asked: Asked, reply: bytes) -> None:
        """Fails unless `reply` holds the oracle's answers, bit for bit."""
        answers = codec.decode_score_reply(
            reply,
            shard_set=self.manifest.shard_set_bytes,
            shard=shard,
            queries=len(asked.queries),
            request_checksum=asked.checksum,
        )
        expected = [self.oracle.score(context, word) for context, word in asked.queries]
        bits = np.array([e.log10_prob for e in expected], np.float32)
        assert answers.log10_prob.tobytes() == bits.tobytes()
        assert answers.matched_order.tolist() == [e.matched_order for e in expected]
        assert answers.ngram_length.tolist() == [e.ngram_length for e in expected]
        assert answers.state_length.tolist() == [e.state_length for e in expected]


def pack(groups: list[tuple[tuple[int, ...], list[int]]]) -> QueryGroups:
    """(context, words) pairs as arrays."""
    return QueryGroups(
        np.array([len(c) for c, _ in groups], np.uint8),
        np.array([i for c, _ in groups for i in c], np.uint32),
        np.array([len(w) for _, w in groups], np.uint32),
        np.array([i for _, w in groups for i in w], np.uint32),
    )


def seal(message: pb.ScoreRequest) -> bytes:
    """The message with the checksum that its content gives, whatever the content."""
    message.checksum = codec.checksum(
        message.shard_set,
        message.shard.to_bytes(4, "little"),
        message.context_lengths,
        message.context_words,
        message.word_counts,
        message.words,
    )
    return message.SerializeToString()
