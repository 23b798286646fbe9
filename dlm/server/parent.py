"""A child that ends with the process that started it, however that ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # Linux: the signal a child gets when its parent dies


def end_with_parent(parent: int) -> None:
    """In the child of `parent`, right after the fork: SIGTERM for this process when it dies.

    Ends the process where the parent is dead already. Cleared by no exec, inherited by no child.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
