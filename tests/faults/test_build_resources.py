"""A build keeps to its memory, looks at the disk before it begins, and says how far it is."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import forked
from dlm.errors import ConfigError
from dlm.index.making import build_shard_set
from dlm.index.making.budget import (
    Budget,
    credible_counts,
    in_memory_bytes,
    least_bytes,
    spill_bytes,
)
from dlm.ngram.arpa import ArpaReader
from index.oracle import build_whole
from models import PlainModel, random_model

MIB = 1 << 20
Usage = namedtuple("Usage", "total used free")


def large_arpa(path: Path, words: int, per_order: int) -> Path:
    """A model of order 3 that no suffix lacks, written line by line."""
    rng = random.Random(3)
    vocabulary = ["<unk>", "<s>", "</s>", *(f"word{i}" for i in range(words))]
    pairs = sorted({(rng.randrange(3, words), rng.randrange(3, words)) for _ in range(per_order)})
    triples = sorted({(*rng.choice(pairs), rng.randrange(3, words)) for _ in range(per_order)})
    with path.open("w") as out:
        counts = (len(vocabulary), len(pairs), len(triples))
        out.write("\\data\\\n" + "".join(f"ngram {k}={n}\n" for k, n in enumerate(counts, 1)))
        out.write("\n\\1-grams:\n")
        out.writelines(f"{-rng.random() - 1:.6f}\t{w}\t-0.5\n" for w in vocabulary)
        for k, rows in ((2, pairs), (3, triples)):
            out.write(f"\n\\{k}-grams:\n")
            for row in rows:
                text = " ".join(vocabulary[w] for w in row)
                out.write(f"{-rng.random() * 4:.6f}\t{text}" + ("\t-0.25\n" if k < 3 else "\n"))
        out.write("\n\\end\\\n")
    return path


MEASURED = """
import sys
from pathlib import Path
from dlm.index.making import build_shard_set
said = []
memory = int(sys.argv[3])
build_shard_set(sys.argv[1], sys.argv[2], 2, memory_bytes=memory, progress=said.append)
spilled = any("spilling" in line for line in said)
# Not ru_maxrss: that begins with what the process had that started this one.
status = Path("/proc/self/status").read_text()
(peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
print(int(peak) << 10, spilled)
"""


@pytest.mark.promise("memory_and_reshard")
@pytest.mark.slow
def test_memory_stays_within_the_limit(tmp_path: Path) -> None:
    """Of a model that would take several times as much; and the bytes are the same."""
    path = large_arpa(tmp_path / "m.arpa", 5000, 1_500_000)
    with ArpaReader(path) as reader:
        limit = least_bytes(reader.counts, 2, 2) + 10 * MIB
        assert in_memory_bytes(reader.counts) > limit
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path), str(tmp_path / "set"), str(limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, spilled = done.stdout.split()
    assert spilled == "True"
    assert int(peak) <= limit + 300 * MIB
    build_shard_set(path, tmp_path / "memory", 2)
    for file in (tmp_path / "memory").iterdir():
        assert file.read_bytes() == (tmp_path / "set" / file.name).read_bytes()


def test_a_disk_with_too_little_room_is_seen_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says needed, free and where; nothing is left."""
    path = random_model(1).write(tmp_path / "m.arpa")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 7, 3))
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"[\d,]+ bytes in .*set.building, .* 3 "):
        build_shard_set(path, tmp_path / "set", 1, progress=said.append)
    assert not any(line.startswith("reading") for line in said)
    assert [p.name for p in tmp_path.iterdir()] == ["m.arpa"]


def test_the_folder_for_spilling_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is on another disk, each must have its own room."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs another file system")
    budget = Budget(True, 8 * MIB, 8 * MIB)
    monkeypatch.setattr(Budget, "of", classmethod(lambda *_: budget))
    path = random_model(1).write(tmp_path / "m.arpa")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda p: Usage(9, 9, 0 if str(p).startswith("/dev") else 1 << 40)
    )
    with pytest.raises(ConfigError, match=r"bytes in /dev/shm"):
        build_shard_set(path, tmp_path / "set", 1, spill=other)
    assert not list(other.glob("dlm-set-*"))


# A file system that is full after some bytes: every write counts.
FULL = """
import errno, os, pathlib, sys
from dlm import files
from dlm.index.making import build_shard_set
from dlm.index.making.budget import Budget
budget = Budget(True, 8 << 20, 8 << 20, block_rows=50, capacity_rows=100)
Budget.of = classmethod(lambda *_: budget)
left = int(sys.argv[3])
real, pwrite = pathlib.Path.open, os.pwrite

def take(data):
    global left
    left -= memoryview(data).nbytes
    if left < 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

class Full:
    def __init__(self, file):
        self._file = file
    def write(self, data):
        take(data)
        return self._file.write(data)
    def __getattr__(self, name):
        return getattr(self._file, name)
    def __enter__(self):
        return self
    def __exit__(self, *a):
        return self._file.__exit__(*a)

def opened(self, mode="r", *a, **k):
    file = real(self, mode, *a, **k)
    return Full(file) if "w" in mode and not self.name.endswith("lock") else file

def write_at(descriptor, data, at):
    take(data)
    return pwrite(descriptor, data, at)

pathlib.Path.open, os.pwrite = opened, write_at
files.open = lambda *a, **k: Full(open(*a, **k))
try:
    build_shard_set(sys.argv[1], sys.argv[2], 2)
    print("built")
except OSError as exc:
    print("OSError", exc.errno, exc)
"""


@pytest.mark.parametrize(
    "part",
    [0.0, 0.98, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.1, 0.3, 0.5, 0.7, 0.9))],
)
def test_a_disk_that_fills_up_leaves_nothing_and_a_message(part: float, tmp_path: Path) -> None:
    """At any stage; with room, the same command succeeds."""
    path = random_model(2, per_order=600).write(tmp_path / "m.arpa")
    target = tmp_path / "set"
    done = forked.script(FULL, path, target, int(part * 290_000))
    assert done.stdout.startswith("OSError 28"), done.stdout + done.stderr
    assert "free" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["m.arpa"]
    build_shard_set(path, target, 2)


def test_counts_that_no_file_can_hold_are_not_believed(tmp_path: Path) -> None:
    """A header that promises too much is refused for what it is, not for memory or disk."""
    path = random_model(1).write(tmp_path / "m.arpa")
    text = path.read_text()
    path.write_text(text.replace("ngram 3=", "ngram 3=4000000"))
    with ArpaReader(path) as reader:
        assert credible_counts(reader)[2] < len(text)
        assert spill_bytes(credible_counts(reader)) < 1000 * len(text)


def test_the_memory_for_words_is_part_of_the_limit(tmp_path: Path) -> None:
    """A limit that the words alone would fill is refused."""
    with pytest.raises(ConfigError, match="1,000,000 words"):
        Budget.of(256 * MIB, [1_000_000, 5], 2)
    assert not Budget.of(512 * MIB, [1000, 5], 2).durable
    assert Budget.of(512 * MIB, [1000, 5, 50_000_000], 2).durable
    with pytest.raises(ConfigError, match="word pairs"):  # a shard's roots
        Budget.of(512 * MIB, [1000, 50_000_000], 2, 2)
    assert Budget.of(512 * MIB, [1000, 50_000_000], 2, 20).durable


def test_a_model_from_a_pipe_is_sharded(tmp_path: Path) -> None:
    """It is read once; there is nothing to go on from after a kill."""
    model: PlainModel = random_model(2, per_order=100)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    writer = subprocess.Popen([sys.executable, "-c", write, str(pipe), model.arpa()])
    streamed = build_shard_set(pipe, tmp_path / "piped", 2)
    writer.wait()
    build_whole(model.write(tmp_path / "m.arpa"), tmp_path / "plain", 2)
    assert streamed.shard_set in (tmp_path / "plain" / "manifest.json").read_text()
