"""A build that is killed is never taken for a model; of one without room see
`test_build_resources.py`."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from dlm.index.check.verify import verify
from dlm.index.making import build_shard_set
from dlm.index.making.budget import Budget
from dlm.index.making.work import JOURNAL
from index.oracle import build_whole
from models import contents, random_model

SHARDS = 6
MIB = 1 << 20

# A build that spills (argument 4: rows sorted at once; 0: in memory), and says what it does. It
# ends no stage after its line number argument 5: there it is killed, at the latest.
CHILD = """
import signal, sys
from dlm.index.making import build_shard_set
from dlm.index.making.budget import Budget
arpa, output, shards, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if rows:
    size = 8 << 20
    budget = Budget(True, size, size, block_rows=max(rows // 4, 50), capacity_rows=rows)
    Budget.of = classmethod(lambda *_: budget)
lines = 0
def progress(line):
    global lines
    if "%" in line:
        return  # what is said by the clock, on a slow machine
    if lines >= int(sys.argv[5]):
        signal.pause()
    lines += 1
    print(line, flush=True)
build_shard_set(arpa, output, shards, progress=progress)
"""


def child(model: Path, target: Path, rows: int, stage: int) -> subprocess.Popen[str]:
    """Starts a build in a process of its own."""
    return forked.Popen(
        [sys.executable, "-c", CHILD, *map(str, (model, target, SHARDS, rows, stage))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that writing it takes a moment."""
    folder = tmp_path_factory.mktemp("model")
    return random_model(9, words=60, per_order=1500).write(folder / "model.arpa")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a build makes that is left alone."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    build_whole(model, folder, SHARDS)
    return contents(folder)


def lines_until_killed(build: subprocess.Popen[str], stage: int, rng: random.Random) -> list[str]:
    """Kills a build a little after its line number `stage`; what it said."""
    assert build.stdout is not None
    said = []
    with build:
        for line in build.stdout:
            said.append(line.strip())
            if len(said) == stage:
                time.sleep(rng.random() * 0.02)  # somewhere inside the stage
                build.send_signal(signal.SIGKILL)
    return said


@pytest.mark.promise("whole_or_none")
def test_a_killed_build_leaves_no_set_or_a_whole_one(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Killed at every kind of stage, in memory; the next build succeeds and gives the same."""
    rng = random.Random(4)
    for stage in (1, 5, 10):
        target = tmp_path / "set"
        build = child(model, target, 0, stage)
        lines_until_killed(build, stage, rng)
        assert build.returncode == -signal.SIGKILL
        if target.exists():
            assert verify(target).ok
        else:
            build_shard_set(model, target, SHARDS)
        assert contents(target) == whole
        shutil.rmtree(target)
        assert not (tmp_path / "set.building").exists()


def killed_until_done(
    model: Path, folder: Path, kills: int, rows: int, rng: random.Random
) -> tuple[int, int]:
    """Builds `folder`, killed so often at random; how often it was, and how often it went on.

    After some kills the build needs fewer stages than the next kill would wait for: it is done.
    """
    died = resumed = 0
    for _ in range(kills + 1):
        stage = rng.choice([1, 2, 3, 3, 3]) if died < kills else 10_000
        build = child(model, folder, rows, stage)
        said = lines_until_killed(build, stage, rng)
        resumed += any(line.startswith("resuming") for line in said)
        assert not any("cannot resume" in line for line in said), said
        if build.returncode == 0:
            break
        assert build.returncode == -signal.SIGKILL, said
        died += 1
        if folder.exists():
            break  # killed between its publication and its end: then it must be whole
        left = folder.with_name(folder.name + ".building")
        assert [v.rule for v in verify(left).violations] == ["manifest"]
    return died, resumed


@pytest.mark.promise("whole_or_none")
@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_build_killed_again_and_again_ends_in_the_same_bytes(
    kills: int, model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """SIGKILL at random moments; it goes on from where it was."""
    died, resumed = killed_until_done(model, tmp_path / "set", kills, 500, random.Random(7))
    assert died == kills
    assert resumed >= kills // 2
    assert contents(tmp_path / "set") == whole
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


KILLS_ITSELF = """
import os, signal, sys
from dlm.index.making import build_shard_set
from dlm.index.making.budget import Budget
budget = Budget(True, 8 << 20, 8 << 20, block_rows=100, capacity_rows=500)
Budget.of = classmethod(lambda *_: budget)

def progress(line):
    if line.startswith("writing shard-0001"):
        os.kill(os.getpid(), signal.SIGKILL)

build_shard_set(sys.argv[1], sys.argv[2], int(sys.argv[3]), progress=progress)
"""


@pytest.fixture
def leftovers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a build leaves that was killed when its first shard was written."""
    done = forked.script(KILLS_ITSELF, model, tmp_path / "set", SHARDS)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "set").exists()
    budget = Budget(True, 8 * MIB, 8 * MIB, block_rows=100, capacity_rows=500)
    monkeypatch.setattr(Budget, "of", classmethod(lambda *_: budget))
    return tmp_path / "set.building"


def test_the_leftovers_of_a_killed_build_are_no_shard_set(leftovers: Path, model: Path) -> None:
    """The folder it wrote in has no manifest, and verify says that the build did not finish."""
    assert (leftovers / "shard-0000.arrow").exists()
    report = verify(leftovers)
    assert [v.rule for v in report.violations] == ["manifest"]
    assert "interrupted" in report.violations[0].message
    said: list[str] = []
    build_shard_set(model, leftovers.with_name("set"), SHARDS, progress=said.append)
    assert "writing shard-0000.arrow" not in said
    assert "writing shard-0001.arrow" in said
    assert not leftovers.exists()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("journal", "cannot resume"),
        ("missing", "is missing"),
        ("shard", "has changed"),
        pytest.param("arguments", "other arguments", marks=pytest.mark.slow),
        ("input", "another input"),
        pytest.param("version", "another version", marks=pytest.mark.slow),
    ],
)
def test_leftovers_that_do_not_fit_are_thrown_away(
    damage: str, why: str, leftovers: Path, model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The build says so, begins anew, and gives the same bytes as one left alone."""
    shards = SHARDS
    journal = leftovers / JOURNAL
    if damage == "journal":
        journal.write_text("{}")
    elif damage == "missing":
        next((leftovers / "spill").glob("*.column")).unlink()
    elif damage == "shard":
        (leftovers / "shard-0000.arrow").write_bytes(b"ARROW1")
    elif damage == "arguments":
        shards += 1
    elif damage == "input":
        model = Path(shutil.copy(model, tmp_path / "model.arpa"))
    elif damage == "version":
        content = json.loads(journal.read_text())
        content["key"]["dlm"] = "0"
        journal.write_text(json.dumps(content))
    said: list[str] = []
    build_shard_set(model, tmp_path / "set", shards, progress=said.append)
    assert any(why in line and "starting over" in line for line in said), said
    if shards != SHARDS:
        build_whole(model, tmp_path / "expected", shards)
        whole = contents(tmp_path / "expected")
    assert contents(tmp_path / "set") == whole
    assert not leftovers.exists()
