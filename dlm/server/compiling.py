"""Compiles a server's kernels before it reads its shard."""

from __future__ import annotations

import time

from dlm.index.search import shard
from dlm.jit import compile_ahead
from dlm.logs import EventLog
from dlm.server import kernels
from dlm.wire import kernels as checks

logger = EventLog(__name__)

KERNELS = (
    *shard.KERNELS,
    *(kernels.first_fault, kernels.count_orders, kernels.count_slots),
    checks.totals,
)


def compile_kernels() -> None:
    begun = time.monotonic()

    def tell(done: int, of: int) -> None:
        if done in (0, of):
            facts = {"kernels": of, "duration_s": round(time.monotonic() - begun, 3)}
            logger.info("server.compiled" if done else "server.compiling", extra=facts)

    compile_ahead(KERNELS, tell)
