"""Sets gRPC up for this process. `dlm.client` and `dlm.server` import this before anything else.

gRPC reads these variables once, when it is first imported. A program that imported it earlier keeps
what it had then, and a variable that is set already is left as it is.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

EXPERIMENTS = "GRPC_EXPERIMENTS"
# Since 1.81, gRPC's "event engine" passes each event from the thread that polls to another. Its
# earlier poller, which it still has, saves a tenth of a message's CPU time in a client and a sixth
# in a server (tests/benchmarks/README.md).
POLLER = "-event_engine_client,-event_engine_listener"
# To others these names may be unknown, which gRPC would print on standard error.
VERSIONS = (1, 81), (1, 85)


def chooses_poller() -> bool:
    """Whether dlm chooses the poller: the program has not, and this version of gRPC has both."""
    if "grpc" in sys.modules or EXPERIMENTS in os.environ:
        return False
    major, minor, *_ = version("grpcio").split(".")
    first, last = VERSIONS
    return first <= (int(major), int(minor)) <= last


# Lets a process that has used a client fork (see `client/deliver/fork`).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")
if chooses_poller():
    os.environ[EXPERIMENTS] = POLLER
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[EXPERIMENTS]  # not for the processes that this one starts
