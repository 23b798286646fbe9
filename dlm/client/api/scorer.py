"""What scores batches of ids: servers (`core.Core`), or a shard set in this process (`local`).

Handles and both faces of the client use either through this, and do not ask which it is.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlm.client.api.config import ClientConfig
from dlm.client.api.metrics import ClientMetrics, Stats
from dlm.client.deliver.asks import SCORES, Asks
from dlm.client.deliver.call import Call, EndedCall
from dlm.client.deliver.runtime import Snapshot
from dlm.client.health.cascade import CascadeMonitor, CascadeStatus
from dlm.client.health.modes import Mode
from dlm.client.plan.topology import Topology
from dlm.index.search.local import LocalModel

Asked: TypeAlias = Call | EndedCall


class Scorer(Protocol):
    """Scores batches of ids.

    Attributes
        local_model  what answers, where that is in this process; None where servers do
    """

    config: ClientConfig
    local_model: LocalModel | None

    # -- life

    @property
    def begun(self) -> bool:
        """Whether servers were found, or are watched for."""

    def begin_small(self) -> None:
        """No server answers, so the first utterances go to the small model already."""

    def check_open(self) -> None:
        """Raises ClientClosed where it is closed."""

    def close(self) -> None:
        """Calls under way fail with `ClientClosed`, and so do all that follow."""

    # -- for handles

    def snapshot(self) -> Snapshot:
        """The shard set in use; where it is not known yet, it is found.

        Raises  UnavailableError, ProtocolError, ConfigError
        """

    def current(self, timeout_s: float, unlike: str | None = None) -> Snapshot:
        """What a new handle is opened on; see `Table.current`."""

    def mode(self) -> Mode:
        """Which model new utterances are scored with."""

    def limit_s(self, deadline_s: float) -> float:
        """Seconds after which a call with this deadline has ended."""

    def submit(
        self,
        model: str,
        contexts: NDArray[np.uint32],
        lengths: NDArray[np.uint8],
        counts: NDArray[np.uint32],
        words: NDArray[np.uint32],
        deadline_s: float | None = None,
        held: Snapshot | None = None,
        *,
        moves_on: bool = False,
        more: bool = False,
        ahead: int = 0,
        asks: Asks = SCORES,
    ) -> Asked:
        """Starts a call; see `Core.submit`."""

    # -- what is known of it

    def known(self) -> Topology | None:
        """The shard set in use, and where its shards are; None before any was found."""

    def cascade(self) -> CascadeStatus:
        """How the servers and the cascade stand.

        Raises  ConfigError  nobody watches them
        """

    def watch(self) -> CascadeMonitor | None:
        """What watches the servers; None where nobody does."""

    def load(self) -> dict[int, tuple[int, int]]:
        """Of each shard asked so far: messages in flight, and parts that wait for one."""

    def cache_bytes(self) -> int:
        """Bytes of the files in use of the model's vocabulary and low orders."""

    @property
    def stats(self) -> Stats:
        """The counters of this process, as they stand now."""

    @property
    def counts(self) -> ClientMetrics:
        """What the metrics of this process are made of."""
