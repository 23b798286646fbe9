"""A shard answers alike wherever its bytes are held, and says what keeps them from being locked."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dlm import memory_options
from dlm.index import layout
from dlm.index.search.local import LocalModel
from dlm.index.search.view import WORD_VALUE
from dlm.memory_options import MAPPED, MemoryOptions
from dlm.ngram.backoff import DictModel
from index.oracle import write_columns
from models import assert_equals_oracle, build, queries, random_model

HELD = {
    "mapped": MAPPED,
    "preloaded": MemoryOptions(preload=True),
    "huge": MemoryOptions(huge_pages=True),
}


@pytest.mark.parametrize("name", HELD)
def test_answers_do_not_depend_on_where_the_bytes_are(name: str, tmp_path: Path) -> None:
    """The oracle's bits each time."""
    folder = build(random_model(5, order=4), tmp_path, 2)
    oracle = DictModel.from_arpa(tmp_path / "model.arpa")
    asked = queries(oracle, 300)
    local = LocalModel.open(folder, memory_options=HELD[name])
    assert_equals_oracle(local.score(*asked), oracle, *asked)


def of_map(address: int, name: str) -> list[str]:
    """What the system says by that name of the map that holds `address`: smaps of proc(5)."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(match[1], 16) <= address < int(match[2], 16)
        elif here and line.startswith(f"{name}:"):
            return line.split()[1:]
    raise AssertionError(f"no map holds {address:x}")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="/proc/self/smaps is not there")
def test_a_preloaded_file_is_mapped_whole_before_it_is_read(tmp_path: Path) -> None:
    """Without, only what Arrow's header reads is there."""
    path = tmp_path / "low_orders.arrow"
    arrays = {
        name: np.zeros(1 << 20 if name == "list" else 0, dtypes[0])
        for name, dtypes in layout.LOW_ORDER_COLUMNS.items()
    }
    size, digest = write_columns(path, "low_orders", arrays)
    entry = layout.FileEntry("low_orders", None, path.name, size, digest, 0, 0, 0)
    held = {}
    for preload in (False, True):
        columns = layout.map_columns(
            path, entry, verify=False, memory_options=MemoryOptions(preload=preload)
        )
        held[preload] = int(of_map(columns["list"].ctypes.data, "Rss")[0])
    assert held[True] >= size >> 10
    assert held[False] < size >> 11


def test_a_file_is_preloaded_while_other_threads_run(tmp_path: Path) -> None:
    """A server that loads a model answers meanwhile, and reports that it lives: since no thread
    must give way here (the interval), another gets turns only if pages are read without the GIL."""
    size, turns, over, during = 32 << 20, [0], threading.Event(), [0]

    def take_turns() -> None:
        while not over.is_set():
            time.sleep(0)
            turns[0] += 1

    other, interval = threading.Thread(target=take_turns), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(size)
        other.start()
        while len(during) < 2000 and not any(during):  # a full machine may give it none at once
            with memory_options.hold(file, size) as held:
                before = turns[0]
                memory_options._populate(held, size)
                during.append(turns[0] - before)
    sys.setswitchinterval(interval)
    over.set()
    other.join()
    assert any(during)


THP = Path("/sys/kernel/mm/transparent_hugepage")


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no transparent huge pages")
def test_a_map_asks_for_huge_pages_where_the_file_fits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that does not, the system reads no more than it must."""
    folder = build(random_model(5), tmp_path)
    asked = {}
    for free in (1 << 40, 1 << 10):
        monkeypatch.setattr(memory_options, "available_bytes", lambda free=free: free)
        local = LocalModel.open(folder)
        asked[free] = "hg" in of_map(int(local.low.view[WORD_VALUE]), "VmFlags")
    assert asked == {1 << 40: True, 1 << 10: False}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may lock any amount of memory")
def test_memory_that_cannot_be_locked_is_told_with_its_limit(tmp_path: Path) -> None:
    """The message names the limit; in a child, whose limit is its own."""
    folder = build(random_model(5), tmp_path)
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "from dlm.index.search.local import LocalModel\n"
        "from dlm.memory_options import MemoryOptions\n"
        "LocalModel.open(sys.argv[1], memory_options=MemoryOptions(lock=True))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert "ConfigError" in done.stderr
    assert "ulimit -l" in done.stderr


def test_locked_pages_are_counted_as_locked(tmp_path: Path) -> None:
    """VmLck of the process grows by the files."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() and 0 <= limit < 1 << 20:
        pytest.skip(f"only {limit} bytes may be locked here")
    folder = build(random_model(5), tmp_path)
    before = locked_kib()
    local = LocalModel.open(folder, memory_options=MemoryOptions(lock=True))
    size = sum(entry.bytes for entry in local.manifest.files[1:])
    assert locked_kib() - before >= size >> 10


def locked_kib() -> int:
    """KiB that this process has locked."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"VmLck:\s+(\d+) kB", text)
    assert match
    return int(match[1])
