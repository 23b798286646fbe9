"""Provides gRPC for servers, with the poller that costs them least: servers import this `grpc`.

gRPC reads GRPC_EXPERIMENTS when it is first imported; a value that is already set stays.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

EXPERIMENTS = "GRPC_EXPERIMENTS"
# Since 1.81, gRPC's "event engine" passes each event from a polling thread to another thread. The
# earlier poller, which gRPC still has, saves a server 14 to 24 % of its CPU time (DESIGN.md). A
# client gains nothing: there, the earlier poller writes to the network while it holds the GIL.
POLLER = "-event_engine_client,-event_engine_listener"
# Other versions may not know these names, and would print that on standard error.
VERSIONS = (1, 81), (1, 85)


def chooses_poller() -> bool:
    """Whether dlm may choose the poller: the program did not, and this gRPC has both pollers."""
    if "grpc" in sys.modules or EXPERIMENTS in os.environ:
        return False
    major, minor, *_ = version("grpcio").split(".")
    first, last = VERSIONS
    return first <= (int(major), int(minor)) <= last


chosen = chooses_poller()
if chosen:
    os.environ[EXPERIMENTS] = POLLER
import grpc as grpc  # noqa: E402

if chosen:
    del os.environ[EXPERIMENTS]  # not inherited by child processes
