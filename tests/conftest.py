"""What every test stands on, whoever started the suite."""

from __future__ import annotations

import faulthandler
import gc
import importlib
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected is there to the end: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()
    if hasattr(session.config, "workerinput") and len(session.items) > 1000:
        compile_kernels()


def compile_kernels() -> None:
    """Before most of the suite runs, kernels are compiled: by one of its processes, which the
    others wait for. Each would compile them for itself where they are first called."""
    from dlm import jit

    paths = sorted({path for name in jit.SOURCES[:2] for path in jit.PACKAGE.rglob(name)})
    parts = [path.relative_to(jit.PACKAGE).with_suffix("").parts for path in paths]
    modules = [importlib.import_module(".".join(["dlm", *names])) for names in parts]
    found = [kernel for module in modules for kernel in vars(module).values()]
    jit.compile_ahead([k for k in found if getattr(getattr(k, "_cache", None), "types", "")])


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
