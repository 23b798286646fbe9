"""Heartbeats to one server: separate calls, over a channel on the loop.

They do not use gRPC's synchronous stack, which starts a thread whenever it was idle, and wakes
another for each answer: that took four times the processor time, and starting a thread delays the
loop while other threads compute.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from dlm.client.config.credentials import Metadata
from dlm.client.deliver.exchange import SERVICE, Reply, error_of_call, tell
from dlm.client.deliver.loop import LoopThread
from dlm.errors import DlmError, ProtocolError, ShardDown


class SentBeat(NamedTuple):
    """A heartbeat in flight; `deadline` is on `monotonic`."""

    request: bytes
    deadline: float
    metadata: Metadata
    reply: Reply


class Beats:
    """Runs on the loop. The channel is opened for the first heartbeat, and ends at the latest with
    the loop.

    Guarantees
        `reply` of each heartbeat is called once, on the loop, or `suspend` returns the heartbeat
    """

    def __init__(self, address: str, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._address = address
        self._open_channel = open_channel
        self._out: dict[int, SentBeat] = {}
        self._number = 0
        self._unsent: deque[int] = deque()
        self._home: LoopThread | None = None  # the thread of the channel's loop
        self._task: asyncio.Task[None] | None = None
        self._some = asyncio.Event()

    def send(self, home: LoopThread, beat: SentBeat) -> None:
        """Sends a heartbeat, to be answered by its deadline."""
        self._number += 1
        self._out[self._number] = beat
        self._unsent.append(self._number)
        if self._home is home:
            self._some.set()
        else:
            self._home, self._some = home, asyncio.Event()
            self._task = home.start(self._run(home, self._some))

    def suspend(self) -> list[SentBeat]:
        """Before a fork: returns the heartbeats in flight, to be sent again after it."""
        out, self._out = list(self._out.values()), {}
        return out

    def close(self) -> None:
        """Ends the heartbeats in flight."""
        if self._task is not None:
            self._task.cancel()
        for beat in self.suspend():
            tell(beat.reply, None, self._closed())

    def _closed(self) -> DlmError:
        return ShardDown(f"the connection to {self._address} was closed")

    def _failed(self, cause: Exception) -> DlmError:
        error = DlmError(f"a heartbeat to {self._address} failed: {cause!r}")
        error.__cause__ = cause
        return error

    async def _run(self, home: LoopThread, some: asyncio.Event) -> None:
        error = self._closed()
        try:
            # Opened here: a loop that ends cancels unstarted tasks, and must leave no channel open.
            async with self._open_channel() as channel:
                method = channel.unary_unary(f"/{SERVICE}/Heartbeat")
                while True:
                    while self._unsent:
                        number = self._unsent.popleft()
                        if number in self._out:
                            home.start(self._ask(method, number, self._out[number]))
                    some.clear()
                    await some.wait()
        except Exception as exc:  # noqa: BLE001 - the heartbeats must end
            error = exc if isinstance(exc, DlmError) else self._failed(exc)
        finally:
            # Nothing may reference the channel once this ends: see `loop.stop`.
            method = channel = None
            if self._some is some:
                self._home = self._task = None
            for number in self._unsent:
                if (beat := self._out.pop(number, None)) is not None:
                    tell(beat.reply, None, error)
            self._unsent.clear()

    async def _ask(self, method: Any, number: int, beat: SentBeat) -> None:
        data: bytes | None = None
        error = self._closed()
        try:
            left_s = max(beat.deadline - time.monotonic(), 0.0)
            data = await method(beat.request, timeout=left_s, metadata=beat.metadata or None)
            if data is None:  # a success for gRPC, but the message's frame was damaged
                error = ProtocolError(f"{self._address} answered without a message")
        except grpc.RpcError as exc:
            error = error_of_call(exc, self._address)
        except Exception as exc:  # noqa: BLE001 - the heartbeats must end
            error = self._failed(exc)
        finally:
            if self._out.pop(number, None) is not None:
                tell(beat.reply, *((None, error) if data is None else (data, None)))
