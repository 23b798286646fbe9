"""A build that dies, by a signal or for want of room, is never taken for a model."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlm.index.build import build_shard_set
from dlm.index.verify import verify
from models import random_model

KILLS = 8
SHARDS = 6

# Says when it is at the stage named, so that a kill falls near it on a machine of any speed.
CHILD = """
import sys
from dlm.index.build import build_shard_set
stages = 0
def progress(line):
    global stages
    stages += 1
    if stages == int(sys.argv[3]):
        print("here", flush=True)
build_shard_set(sys.argv[1], sys.argv[2], int(sys.argv[4]), progress=progress)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that writing it takes a moment."""
    folder = tmp_path_factory.mktemp("model")
    return random_model(9, words=60, per_order=4000).write(folder / "model.arpa")


def test_a_killed_build_leaves_no_set_or_a_whole_one(model: Path, tmp_path: Path) -> None:
    """Killed at every kind of stage; the next build succeeds and gives the same bytes."""
    expected = build_shard_set(model, tmp_path / "expected", SHARDS)
    rng = random.Random(4)
    # Two lines before the files, then one for each of them; the last stages include the manifest.
    stages = [1, 2, *sorted(rng.sample(range(3, 3 + 2 + SHARDS), KILLS - 3)), 4 + SHARDS]
    died = 0
    for stage in stages:
        target = tmp_path / "set"
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(model), str(target), str(stage), str(SHARDS)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        for _ in range(rng.randrange(20_000)):  # somewhere inside the stage
            pass
        child.send_signal(signal.SIGKILL)
        child.communicate()
        died += child.returncode == -signal.SIGKILL
        if target.exists():
            assert verify(target).ok
        else:
            manifest = build_shard_set(model, target, SHARDS)
            assert manifest.text == expected.text
        for path in target.iterdir():
            assert path.read_bytes() == (tmp_path / "expected" / path.name).read_bytes()
            path.unlink()
        target.rmdir()
        for name in ("set.building", "set.building.lock"):
            assert not (tmp_path / name).exists() or child.returncode == -signal.SIGKILL
    assert died >= KILLS // 2


KILLS_ITSELF = """
import os, signal, sys
from dlm.index.build import build_shard_set

def progress(line):
    if line.startswith("writing shard-0000"):
        os.kill(os.getpid(), signal.SIGKILL)

build_shard_set(sys.argv[1], sys.argv[2], int(sys.argv[3]), progress=progress)
"""


def test_the_leftovers_of_a_killed_build_are_no_shard_set(model: Path, tmp_path: Path) -> None:
    """The folder it wrote in has no manifest, and verify says that the build did not finish."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS_ITSELF, str(model), str(tmp_path / "set"), str(SHARDS)],
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "set").exists()
    left = tmp_path / "set.building"
    assert (left / "low_orders.arrow").exists()
    report = verify(left)
    assert [v.rule for v in report.violations] == ["manifest"]
    assert "interrupted" in report.violations[0].message
    build_shard_set(model, tmp_path / "set", SHARDS)
    assert not left.exists()


DISK_FULL = """
import resource, sys
from dlm.index.build import build_shard_set
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    build_shard_set(sys.argv[1], sys.argv[2], 2)
except OSError as exc:
    print("OSError", exc.errno)
"""


@pytest.mark.parametrize("room", [0, 100, 3000, 40_000])
def test_a_full_disk_is_an_os_error_and_leaves_nothing(
    room: int, model: Path, tmp_path: Path
) -> None:
    """Simulated by a limit on the size of a file, in a process of its own."""
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(model), str(tmp_path / "set"), str(room)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("OSError"), done.stderr
    assert list(tmp_path.iterdir()) == []
    build_shard_set(model, tmp_path / "set", 2)
