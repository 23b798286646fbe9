"""The suite ends, whatever a test does and whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster import WAIT_S

ROOT = Path(__file__).resolve().parents[1]


def suite(
    folder: Path, tests: str, *options: str, ignored: Sequence[signal.Signals] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs `tests` as a file of a suite with this one's settings and conftest.

    Args
        ignored  signals that whoever starts it ignores
    """
    (folder / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py", "tests/connect_proxy.py"):
        (folder / name).write_text((ROOT / name).read_text())
    (folder / "tests/test_planted.py").write_text(tests)

    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    ignore = [f"--ignore-signal={number.name.removeprefix('SIG')}" for number in ignored]
    return subprocess.run(
        ["env", *ignore, sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_every_test_has_a_bound(pytestconfig: pytest.Config) -> None:
    """Above what a test waits for by itself, so that its own message comes first."""
    assert float(pytestconfig.getini("faulthandler_timeout")) > WAIT_S


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("test", "teardown"),
    [
        pytest.param("hang()", "pass", id="test"),
        pytest.param("pass", "hang()", id="teardown"),
        pytest.param("assert False", "hang()", id="teardown after a failure"),
    ],
)
def test_a_test_that_hangs_is_ended_and_shows_its_stack(
    tmp_path: Path, test: str, teardown: str, workers: int
) -> None:
    """Even where it hears no signal and holds the interpreter's lock; other processes go on."""
    done = suite(
        tmp_path,
        "import ctypes, signal, pytest\n"
        "def hang():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "    ctypes.PyDLL(None).pause()\n"
        "@pytest.fixture\n"
        "def slow():\n"
        "    yield\n"
        f"    {teardown}\n"
        "def test_hangs(slow):\n"
        f"    {test}\n"
        "def test_passes():\n"
        "    pass\n",
        "-o", "faulthandler_timeout=4", "-n", str(workers),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "Timeout (0:00:04)!" in done.stderr
    assert ", line 4 in hang" in done.stderr
    if workers:
        assert "crashed while running 'tests/test_planted.py::test_hangs'" in done.stdout
        assert f"{1 + (test == 'pass')} passed" in done.stdout  # test_passes, and a body that ended


@pytest.mark.slow
def test_children_hear_ctrl_c_where_the_parent_of_the_suite_ignores_it(tmp_path: Path) -> None:
    """`pytest &` in a script: the shell ignores SIGINT for it, and so would all its children."""
    done = suite(
        tmp_path,
        "import subprocess, sys\n"
        "CHILD = 'import signal; print(flush=True); signal.pause()'\n"
        "def test_interrupts():\n"
        "    child = subprocess.Popen([sys.executable, '-c', CHILD], stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "    child.send_signal(2)\n"
        "    with child:\n"
        "        assert child.wait(60) == -2\n",
        "-n", "1", "-o", "faulthandler_timeout=120",
        ignored=[signal.SIGINT],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
