"""One operation of gRPC that sends a message of a stream and receives the next one.

grpc.aio reports each operation by a byte from its own thread to the loop. As one operation, a
message and its reply wake the loop of a client once, not twice, and that of a server, too. grpc.aio
has no public method for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

from grpc._cython import cygrpc

_NAMES = "ExecuteBatchError", "ReceiveMessageOperation", "SendMessageOperation", "execute_batch"
# False for a version of gRPC that is built otherwise.
AVAILABLE = all(hasattr(cygrpc, name) for name in _NAMES)
_NO_FLAGS = 0


def call_of(context: Any) -> Any:
    """What `send_and_receive` takes, of a servicer context; None if it is of another kind.

    The context has it in a field that only the garbage collector can see.
    """
    if not AVAILABLE:
        return None
    return next((one for one in gc.get_referents(context) if _is_call(one)), None)


def _is_call(one: object) -> bool:
    return type(one).__name__ == "RPCState"


async def send_and_receive(call: Any, message: bytes, loop: asyncio.AbstractEventLoop) -> Any:
    """The next message once `message` is sent, too; None if the call or the peer's part has ended.

    Meanwhile gRPC sends nothing else. It waits as long as the peer does not read, or sends nothing.
    """
    receive = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
    both = cygrpc.SendMessageOperation(message, _NO_FLAGS), receive
    with contextlib.suppress(cygrpc.ExecuteBatchError):
        await cygrpc.execute_batch(call, both, loop)
    return receive.message()
