"""Looks at the servers of a run, in a thread of its own: a silent server holds nothing else up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dlm.client import ClientConfig
from dlm.client.config.cluster_file import ClusterFile
from dlm.client.deliver.transport import GrpcConnection
from dlm.cluster.status import ClusterStatus
from loadtest.run.replay import Record

POLL_S = 2.0  # a server's time to answer a look


def machine_cpu() -> dict[str, float] | None:
    """CPU seconds of this machine since it started, busy and in all; None where nobody says."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            ticks = [int(one) for one in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    hertz = os.sysconf("SC_CLK_TCK")
    total = sum(ticks) / hertz
    return {"busy_s": total - (ticks[3] + ticks[4]) / hertz, "total_s": total}


class ServerWatch:
    """What servers say of themselves, once per interval, until it is closed.

    Args    put   takes a record of each look, in the watch's thread
            at_s  seconds since time 0 of the run; None before that is known
    Raises  ConfigError  a client cannot start with this cluster.toml
    """

    def __init__(
        self,
        cluster: Path,
        config: ClientConfig,
        interval_s: float,
        put: Callable[[Record], None],
        at_s: Callable[[], float | None],
    ) -> None:
        file = ClusterFile(cluster, config)
        connect = partial(GrpcConnection, security=file.started.security)
        self._status = ClusterStatus(file(), connect, POLL_S, model=file.model())
        self._interval_s = interval_s
        self._put = put
        self._at_s = at_s
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="loadtest-servers", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        facts = self._status.poll().facts()
        self._put({"type": "servers", "at_s": self._at_s(), "machine": machine_cpu(), **facts})

    def _run(self) -> None:
        began = time.monotonic()
        while not self._closed.wait(max(began + self._interval_s - time.monotonic(), 0.0)):
            began = time.monotonic()
            self._look()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._look()
        self._status.close()
