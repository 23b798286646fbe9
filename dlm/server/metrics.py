"""What a shard server counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dlm.wire.status import Reason


@dataclass(slots=True)
class ServerMetrics:
    """Counts since the start of the process. Touched on the event loop only, so no lock.

    messages   Score messages answered
    queries    queries answered in them
    refusals   Score messages refused, by reason; the labels are the closed set `Reason`
    in_flight  Score messages being worked on now
    streams    Exchange streams open now
    downloads  Download streams open now
    abandoned  Score messages whose client went away before the answer
    unauthenticated  calls of any method refused for want of a good token
    client_limits    calls of any method refused since their client had too much open
    clients    calls let in, by the name of their token; as many labels as the tokens file names
    """

    messages: int = 0
    queries: int = 0
    refusals: Counter[Reason] = field(default_factory=Counter)
    in_flight: int = 0
    streams: int = 0
    downloads: int = 0
    abandoned: int = 0
    unauthenticated: int = 0
    client_limits: int = 0
    clients: Counter[str] = field(default_factory=Counter)

    @property
    def refused(self) -> int:
        """Score messages refused for any reason."""
        return self.refusals.total()
