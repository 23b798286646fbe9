"""A child that ends with its parent process, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # Linux: the signal a child gets when its parent dies


def end_with_parent(parent: int) -> None:
    """Call it in the child of `parent`, right after the fork: SIGTERM comes when the parent dies.

    Ends the process if the parent is already dead. An exec keeps this; children do not inherit it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
