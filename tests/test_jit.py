"""Compiled kernels are found again, by whoever runs the same code, and by nobody else."""

from __future__ import annotations

import fcntl
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm import jit

# Calls one kernel that is compiled in a second; says whether it was compiled, and the answer.
SCRIPT = """
import os
import numpy as np
from dlm import jit
from dlm.wire.kernels import totals
found = totals(np.full(2, 3, np.uint8), np.full(2, 5, np.uint32))
print(sum(totals.stats.cache_misses.values()), *found)
"""


def compiled(folder: Path) -> bool:
    """Whether a process that keeps kernels in `folder` had to compile one; the answer is right."""
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    misses, *answer = done.stdout.split()
    assert answer == ["6", "10", "False"]
    return misses != "0"


@pytest.mark.slow
def test_a_kernel_is_compiled_once_for_all_processes_and_again_where_its_file_is_damaged(
    tmp_path: Path,
) -> None:
    """A file that is cut off or changed is not run."""
    assert compiled(tmp_path)
    assert not compiled(tmp_path)
    (file,) = (tmp_path / "dlm").rglob("dlm.wire.kernels.totals-*")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert compiled(tmp_path)
    assert not compiled(tmp_path)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert compiled(tmp_path)
    assert file.read_bytes() == whole


def test_folders_of_old_versions_go_but_the_newest_and_those_in_use(tmp_path: Path) -> None:
    """A new version removes them when it makes its own folder; other files stay."""
    kernels = tmp_path / "dlm"
    old = [kernels / f"{i:032x}" for i in range(jit.KEPT + 3)]
    for age, folder in enumerate(old):
        folder.mkdir(parents=True)
        (folder / "k").touch()
        os.utime(folder, (10**9 - age, 10**9 - age))
    (kernels / "mine").mkdir()
    with (old[-1] / ".in-use").open("w") as used:
        os.utime(old[-1], (10, 10))
        fcntl.flock(used, fcntl.LOCK_SH)
        assert compiled(tmp_path)
    left = {folder for folder in kernels.iterdir() if folder.name != "mine"}
    assert left - set(old) == {kernels / jit.version()}
    assert left & set(old) == {*old[: jit.KEPT - 1], old[-1]}
    assert (old[-1] / "k").exists()
    assert (kernels / "mine").exists()


def test_a_users_own_compiled_functions_stay_where_numba_keeps_them(tmp_path: Path) -> None:
    """Importing dlm changes no setting of numba."""
    (tmp_path / "own.py").write_text(
        "from numba import njit\n@njit(cache=True)\ndef twice(x):\n    return 2 * x\n"
    )
    script = "import dlm.ngram.kernels, own; own.twice(1); print(own.twice.stats.cache_path)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environ.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "__pycache__")


def test_a_folder_that_can_only_be_read_is_used_and_new_kernels_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an image brought along is not compiled again."""
    brought, own = tmp_path / "image", tmp_path / "user"
    monkeypatch.setattr(jit, "_places", lambda: iter([brought, own]))
    real = jit._claim

    def claim(folder: Path) -> None:
        if brought in folder.parents:
            raise PermissionError(folder)
        real(folder)

    monkeypatch.setattr(jit, "_claim", claim)
    jit.folders.cache_clear()
    try:
        assert jit.folders() == [brought / jit.version(), own / jit.version()]
    finally:
        jit.folders.cache_clear()


@jit.inlined
def third(x: float) -> float:
    return x / 3


@jit.kernel
def two_thirds(x: float) -> float:
    return third(x) + third(x)


@pytest.mark.parametrize("decorator", [jit.kernel, jit.inlined, jit.kernel("int64")])
def test_a_kernel_made_by_a_factory_is_refused(decorator: Callable[[Any], Any]) -> None:
    """It would be cached under the name of its sisters, and answer what they do."""

    def made(x: int) -> int:
        return x

    with pytest.raises(TypeError, match="inside a function"):
        decorator(made)


def test_an_inlined_function_runs_as_written_in_python_also_once_a_kernel_took_it_in() -> None:
    """It has no compiled code that Python could call."""
    assert third(1) == 1 / 3
    assert two_thirds(1) == 2 / 3
    assert third(1) == 1 / 3
    with pytest.raises(TypeError, match="str"):
        third("a")  # type: ignore[arg-type]


# Compiles three kernels ahead; prints what was told, and which of them this process compiled.
AHEAD = """
import os
import sys
from dlm import jit
from dlm.client.kernels import next_states
from dlm.server.kernels import count_orders
from dlm.wire.kernels import totals
kernels = (next_states, count_orders, totals)
if len(sys.argv) > 1:
    jit._HELPER = sys.argv[1]
jit.config.NUMBA_DEFAULT_NUM_THREADS = 2
told = []
count = jit.compile_ahead(kernels, lambda done, of: told.append(f"{done}/{of}"))
print(count, *told)
print(sum(len(k.overloads) for k in kernels))
"""


def ahead(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that compiles ahead into `folder`."""
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", AHEAD, *arguments]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_kernels_are_compiled_ahead_in_two_processes_and_nothing_is_the_second_time(
    tmp_path: Path,
) -> None:
    """Each of them once, by this process or by its helper."""
    out, _ = ahead(tmp_path).communicate()
    counts, here = out.splitlines()
    assert counts == "3 0/3 1/3 2/3 3/3"
    assert 1 <= int(here) <= 3
    assert len(list((tmp_path / "dlm").rglob("dlm.*-*"))) == 3
    out, _ = ahead(tmp_path).communicate()
    assert out.splitlines() == ["0", "0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "helper",
    [
        "import os; os.kill(os.getpid(), 9)",
        pytest.param("raise SystemExit", marks=pytest.mark.slow),
    ],
)
def test_where_a_helper_ends_its_work_is_done_by_the_process_itself(
    helper: str, tmp_path: Path
) -> None:
    """Every kernel is compiled all the same."""
    process = ahead(tmp_path, helper)
    counts, here = process.communicate()[0].splitlines()
    assert counts == "3 0/3 1/3 2/3 3/3"
    assert here == "3"


@jit.kernel("float64")
def thirds_again(x: float) -> float:
    return third(x)


@jit.kernel("float64")
def alone(x: float) -> float:
    return x


def test_two_processes_do_not_compile_kernels_with_the_same_functions_at_once() -> None:
    """The next kernel is the first that shares least with what is being compiled."""
    left = jit._Left([two_thirds, thirds_again, alone])
    assert left.take() is two_thirds
    assert left.take() is alone
    left.compiled(two_thirds)
    left.put_back(alone)
    assert [left.take(), left.take(), left.take()] == [thirds_again, alone, None]


@jit.kernel("uint32[:], out int64[:], bool")
def add(numbers: Any, sums: Any, twice: Any) -> int:
    total = 0
    for number in numbers:
        total += number
    sums[0] = 2 * total if twice else total
    return total


def test_declared_types_take_read_only_and_writable_arrays_and_refuse_others() -> None:
    """All by one compiled form."""
    numbers, sums = np.arange(4, dtype=np.uint32), np.zeros(1, np.int64)
    wrong = np.ones(4, np.float32)
    with pytest.raises(TypeError, match="No matching definition"):
        add(wrong, sums, True)  # even first, though its items are of the right size
    assert add(numbers, sums, True) == 6
    assert sums[0] == 12
    numbers.setflags(write=False)
    assert add(numbers, sums, False) == 6
    assert sums[0] == 6
    assert len(add.signatures) == 1
    sums.setflags(write=False)
    for arguments in ((wrong, sums, True), (numbers, sums, True), (numbers[::2], numbers, True)):
        with pytest.raises(TypeError, match="No matching definition"):
            add(*arguments)
    assert len(add.signatures) == 1


def test_every_declared_kernel_names_a_type_for_each_of_its_arguments() -> None:
    """A file of kernels at a time; what does not fit shows when it is first called, no earlier."""
    found = 0
    for path in jit.PACKAGE.rglob("kernels.py"):
        parts = path.relative_to(jit.PACKAGE).with_suffix("").parts
        for kernel in vars(importlib.import_module(".".join(["dlm", *parts]))).values():
            types = getattr(getattr(kernel, "_cache", None), "types", "")
            if types:
                found += 1
                assert len(jit._types(types)) == kernel.py_func.__code__.co_argcount, kernel
    assert found > 30
