"""What every test stands on, whoever started the suite."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from connect_proxy import VARIABLES

TESTS = Path(__file__).resolve().parent
_STDERR = pytest.StashKey[int]()
_COMPILED = pytest.StashKey[str]()
_PASSED = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What several runs share."""
    parser.addoption(
        "--passed",
        metavar="FILE",
        help="leave out the tests that FILE lists, and add to it those that pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C is heard again where the parent of the suite ignores it, as a shell does for
    `pytest &`: what is ignored stays so in every child, and a test that interrupts one would wait.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where none is kept, each process of the suite compiles all of dlm and of the tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # The suite's own channels and downloads obey them, also to this machine.
    for name in VARIABLES:
        os.environ.pop(name, None)
    # What XLA compiles is kept for all processes of the suite, and for those that tests start.
    config.stash[_COMPILED] = tempfile.mkdtemp(prefix="dlm-compiled-")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", config.stash[_COMPILED])
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")
    named = config.getoption("passed")
    before = Path(named).read_text() if named and Path(named).exists() else ""
    config.stash[_PASSED] = set(before.splitlines())
    config.stash[_STDERR] = os.dup(2)  # tests see another, which pytest reads
    gc.disable()  # while tests are collected: all that is made then stays


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """In a new checkout one process reads the tests first and keeps their bytecode, most of the
    work, for the others; meanwhile the second one compiles the kernels."""
    is_new = not any((TESTS / "__pycache__").glob("test_*-pytest-*"))
    if not is_new or not hasattr(session.config, "workerinput"):
        return (yield)
    with locked(TESTS) as is_first:
        if not is_first:
            with locked(Path(__file__)) as is_second:
                if is_second and [Path(a).resolve() for a in session.config.args] == [TESTS]:
                    compile_kernels()
        with contextlib.nullcontext(True) if is_first else locked(TESTS, fcntl.LOCK_SH):
            return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has passed in an earlier run."""
    left_out = [item for item in items if item.nodeid in config.stash[_PASSED]]
    items[:] = [item for item in items if item.nodeid not in config.stash[_PASSED]]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    """Notes what has passed, its fixtures' ends included."""
    if named := config.getoption("passed"):
        of = terminalreporter.stats
        bad = {report.nodeid for kind in ("failed", "error") for report in of.get(kind, [])}
        passed = config.stash[_PASSED] | {report.nodeid for report in of.get("passed", [])}
        Path(named).write_text("".join(f"{name}\n" for name in sorted(passed - bad)))
    return (yield)


@contextlib.contextmanager
def locked(path: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[bool]:
    """Whether it could be locked; it is, to the end of the block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, how)
        except OSError:  # another has it, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected is there to the end: the garbage collector need not look at it again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if hasattr(session.config, "workerinput") and len(session.items) > 1000:
        compile_kernels()


def compile_kernels() -> None:
    """Before most of the suite runs, kernels are compiled: by one of its processes, which the
    others wait for. Each would compile them for itself where they are first called."""
    from dlm import jit

    jit.compile_ahead(jit.declared_kernels())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**given))
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """Closes what was opened for the suite."""
    os.close(config.stash[_STDERR])
    shutil.rmtree(config.stash[_COMPILED], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Bounds what comes after a test, too: pytest lets go of its bound where a test fails."""
    faulthandler.dump_traceback_later(
        float(item.config.getini("faulthandler_timeout")),
        exit=item.config.getini("faulthandler_exit_on_timeout"),
        file=item.config.stash[_STDERR],
    )
    return (yield)  # pytest ends its own bound after this, and so ours
