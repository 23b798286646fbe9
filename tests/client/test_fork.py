"""dlm.client.deliver.fork: what a child finds of the locks that threads of its parent held."""

from __future__ import annotations

import os
import threading

from cluster import WAIT_S
from dlm.client.deliver import fork
from dlm.client.plan import kernels


def test_a_child_can_compile_though_another_thread_did_when_it_was_forked() -> None:
    """A first call of a kernel takes numba's lock, and a fork waits until nobody has it."""
    fork.register()
    held, done = threading.Event(), threading.Event()

    def compile_something() -> None:
        with kernels.COMPILER:
            held.set()
            done.wait(WAIT_S)

    thread = threading.Thread(target=compile_something)
    thread.start()
    assert held.wait(WAIT_S)
    threading.Timer(0.3, done.set).start()  # while the fork waits
    child = os.fork()
    if not child:
        free = kernels.COMPILER._lock.acquire(timeout=1.0)
        os._exit(0 if free else 1)
    thread.join(WAIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not kernels.COMPILER.is_locked()  # by this thread, which gave it back
