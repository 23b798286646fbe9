"""What every test stands on, whoever started the suite."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from connect_proxy import VARIABLES

_STDERR = pytest.StashKey[int]()
_STATE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C is heard again where the parent of the suite ignores it, as a shell does for
    `pytest &`: what is ignored stays so in every child, and a test that interrupts one would wait.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The suite's own channels and downloads obey them, also to this machine.
    for name in VARIABLES:
        os.environ.pop(name, None)
    # Runs are counted there, which is not this user's.
    config.stash[_STATE] = tempfile.mkdtemp(prefix="dlm-state-")
    os.environ["DLM_STATE_DIR"] = config.stash[_STATE]
    config.stash[_STDERR] = os.dup(2)  # tests see another, which pytest reads


def pytest_unconfigure(config: pytest.Config) -> None:
    """Closes what was opened for the suite."""
    os.close(config.stash[_STDERR])
    shutil.rmtree(config.stash[_STATE], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Bounds what comes after a test, too: pytest lets go of its bound where a test fails."""
    faulthandler.dump_traceback_later(
        float(item.config.getini("faulthandler_timeout")),
        exit=item.config.getini("faulthandler_exit_on_timeout"),
        file=item.config.stash[_STDERR],
    )
    return (yield)  # pytest ends its own bound after this, and so ours
