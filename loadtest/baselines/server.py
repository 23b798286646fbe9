"""A server of a baseline: `python -m loadtest.baselines.server`, started by `running`.

It holds a hash index of its share of the n-grams, and uses dlm's own protocol: ScoreRequests over
an Exchange stream, answered with ScoreReplies. Once ready, it prints its port as JSON.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from dlm.client.stream import SERVICE
from dlm.errors import ShardDown
from dlm.ngram.query import Answers, QueryGroups
from dlm.server.security import channel_options
from dlm.wire import codec
from loadtest.baselines.hash_index import HashIndex, Ngrams
from loadtest.baselines.systems import SYSTEMS, Placed
from loadtest.children import start_child

MAX_QUERIES = 1 << 20
MAX_MESSAGE_BYTES, MAX_IN_FLIGHT = 4 << 20, 1024
SHARD_SET = bytes(codec.SHARD_SET_BYTES)  # baselines have only one shard set
STOP_S = 10.0


class _Service:
    def __init__(self, index: HashIndex, mode: int) -> None:
        self.index = index
        self._mode = mode

    async def exchange(self, _: Any, context: Any) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            request = codec.decode_score_request(data, max_queries=MAX_QUERIES)
            answers, _ = self.index.answer(self._mode, request.groups)
            await context.write(codec.encode_score_reply(request, _packed(answers)))


def _packed(answers: Answers) -> NDArray[np.uint8]:
    small = answers.matched_order, answers.ngram_length, answers.state_length
    return np.concatenate([answers.log10_prob.view(np.uint8), *small])


async def serve(ngrams: Path, system: str, servers: int, number: int) -> None:
    known = Ngrams.read(ngrams)
    service = _Service(Placed(SYSTEMS[system], known, servers).share(known, number), _mode(system))
    del known
    some = np.array([1], np.uint32)
    nothing = QueryGroups(np.array([0], np.uint8), np.empty(0, np.uint32), some, some * 0)
    # Compiles the kernel for arrays from the wire, which are read-only.
    message, _ = codec.encode_score_request(SHARD_SET, number, nothing)
    request = codec.decode_score_request(message, max_queries=MAX_QUERIES)
    service.index.answer(_mode(system), request.groups)
    options = channel_options(
        max_message_bytes=MAX_MESSAGE_BYTES, max_in_flight=MAX_IN_FLIGHT, shares_port=False
    )
    server = grpc.aio.server(options=options)
    method = grpc.stream_stream_rpc_method_handler(service.exchange)
    handler = grpc.method_handlers_generic_handler(SERVICE, {"Exchange": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    sys.stdout.write(json.dumps({"port": port}) + "\n")
    sys.stdout.flush()
    await ended.wait()
    await server.stop(STOP_S / 5)


def _mode(system: str) -> int:
    return SYSTEMS[system].mode


@contextmanager
def running(ngrams: Path, system: str, servers: int) -> Iterator[list[str]]:
    """Runs a system's servers on this machine until the end of the block, and yields their
    addresses. The servers read the n-grams from the file `ngrams`.

    Raises  ShardDown  a server did not start; its message is on standard error
    """
    processes = [
        start_child(
            "loadtest.baselines.server",
            *(str(ngrams.absolute()), system, str(servers), str(number)),
            stdin=subprocess.DEVNULL,
        )
        for number in range(servers)
    ]
    try:
        yield [f"127.0.0.1:{_read(one)['port']}" for one in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ShardDown(
            f"a server of a baseline ended with status {process.wait(STOP_S)}; see its message "
            "above"
        )
    return dict(json.loads(line))


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
