"""dlm.files: whole or not at all, and nothing left behind, whatever ends the process."""

from __future__ import annotations

import ast
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlm import files
from dlm.files import (
    SUFFIX,
    Replacement,
    claim,
    evict,
    link_or_copy,
    lock_file,
    locked,
    replacing,
    scratch_folder,
    unlock,
    write_whole,
)
from parsed import tree_of

ROOT = Path(__file__).parents[1]

# A process that writes `place` as it is asked to, and then waits for a line.
WRITER = """
import sys
from pathlib import Path
from dlm.files import *
place = Path(sys.argv[1])
def wait():
    print("begun", flush=True)
    sys.stdin.readline()
{body}
"""
FILE = """
with replacing(place) as file:
    file.write(b"new")
    wait()
"""
SCRATCH = """
with scratch_folder(place.parent, place.name) as folder:
    (folder / "one").write_bytes(b"new")
    wait()
"""


def writer(place: Path, body: str) -> subprocess.Popen[str]:
    """Such a process, once it has begun to write."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER.format(body=body), str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def names(folder: Path) -> list[str]:
    """Of all that is in a folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.promise("no_half_files")
def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    """Nothing shows before the end; an error leaves what was there, and nothing beside it."""
    place = tmp_path / "a.txt"
    with replacing(place) as file:
        file.write(b"one")
        assert not place.exists()
    assert place.read_bytes() == b"one"
    with pytest.raises(RuntimeError, match="stop"), replacing(place) as file:
        file.write(b"two")
        raise RuntimeError("stop")
    assert place.read_bytes() == b"one"
    write_whole(place, b"three")
    assert place.read_bytes() == b"three"
    assert names(tmp_path) == ["a.txt"]


def test_what_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    """A folder stands there."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(OSError), replacing(tmp_path / "a") as file:
        file.write(b"new")
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["b"]


def test_modes_are_those_that_are_asked_for(tmp_path: Path) -> None:
    """A secret is never wider than asked; owner and mode of what stood there stay where wanted."""
    secret = tmp_path / "secret"
    with replacing(secret, mode=0o600) as file:
        assert stat.S_IMODE(Path(file.name).stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    secret.chmod(0o640)
    with replacing(secret, mode=0o600, keep_owner=True) as file:
        assert stat.S_IMODE(Path(file.name).stat().st_mode) == 0o640
    assert stat.S_IMODE(secret.stat().st_mode) == 0o640
    for name, keeps in (("one", False), ("two", True)):
        write_whole(tmp_path / name, b"", keep_owner=keeps)
    one, two = ((tmp_path / name).stat().st_mode for name in ("one", "two"))
    assert one == two
    with scratch_folder(tmp_path, "work") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_pipe_is_written_to_directly(tmp_path: Path) -> None:
    """It cannot be replaced by a file, and stays a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"through")
    reader.join()
    assert found == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("body", [FILE, SCRATCH], ids=["file", "scratch"])
def test_the_next_one_removes_what_a_killed_process_left_and_nothing_else(
    body: str, tmp_path: Path
) -> None:
    """What a live one writes stays, whatever number its process has; so do other files."""
    place = tmp_path / "model"
    lives = writer(place, body)
    (ours,) = names(tmp_path)
    killed = writer(place, body)
    (left,) = set(names(tmp_path)) - {ours}
    killed.kill()
    killed.communicate()
    # The live one under the number of one that is gone: numbers are used again.
    renamed = ours.replace(str(lives.pid), str(killed.pid))
    (tmp_path / ours).rename(tmp_path / renamed)
    others = [
        ".model.partial",
        ".model.arpa.1-0abc.partial",
        "model.1-0abc.partial",
    ]
    for name in others:
        (tmp_path / name).touch()
    assert left in names(tmp_path)
    with replacing(place) as file:
        file.write(b"x")
        assert names(tmp_path) == sorted([renamed, Path(file.name).name, *others])
    (tmp_path / renamed).rename(tmp_path / ours)
    place.unlink()
    _, errors = lives.communicate("\n")
    assert (lives.returncode, errors) == (0, "")
    made = [] if body is SCRATCH else ["model"]
    assert names(tmp_path) == sorted(made + others)


def test_what_escapes_every_finally_goes_with_the_interpreter(tmp_path: Path) -> None:
    """As where a signal comes between the making of a file and the block that would remove it."""
    process = writer(tmp_path / "model", "held = Replacement(place)\nwait()")
    assert len(names(tmp_path)) == 1
    process.communicate("\n")
    assert names(tmp_path) == []


def test_a_child_leaves_its_parents_files_alone(tmp_path: Path) -> None:
    """It ends by itself, with its parent's list of what is to be removed."""
    body = """
import os
held = Replacement(place)
if not os.fork():
    sys.exit()
os.wait()
wait()
held.commit()
"""
    process = writer(tmp_path / "model", body)
    assert len(names(tmp_path)) == 1
    process.communicate("\n")
    assert names(tmp_path) == ["model"]


def test_one_that_is_taken_for_left_before_it_is_locked_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock another process looks for leftovers: here, each time."""
    real, calls = files.try_lock, []

    def try_lock(descriptor: int) -> bool:
        calls.append(descriptor)
        if len(calls) < 3:
            (beside,) = (p for p in tmp_path.iterdir() if p.name.endswith(SUFFIX))
            beside.unlink()
        return real(descriptor)

    monkeypatch.setattr(files, "try_lock", try_lock)
    write_whole(tmp_path / "model", b"whole")
    assert len(calls) == 3
    assert (tmp_path / "model").read_bytes() == b"whole"
    assert names(tmp_path) == ["model"]


def test_where_nothing_can_be_locked_files_are_written_and_leftovers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have no locks: nobody can tell what is left there."""

    def no_locks(descriptor: int) -> bool:
        raise OSError(os.strerror(37))

    (tmp_path / ".model.1-0abc.partial").touch()
    monkeypatch.setattr(files, "try_lock", no_locks)
    write_whole(tmp_path / "model", b"whole")
    assert names(tmp_path) == [".model.1-0abc.partial", "model"]


def test_a_discard_after_the_end_does_nothing(tmp_path: Path) -> None:
    """Nor does a second one."""
    replacement = Replacement(tmp_path / "a")
    replacement.commit()
    replacement.discard()
    assert names(tmp_path) == ["a"]


def test_signals_are_those_of_the_command_alone() -> None:
    """A library leaves its caller's handlers alone."""
    code = "import signal, dlm.files; print(signal.getsignal(signal.SIGTERM))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(signal.SIG_DFL)


def test_what_is_moved_takes_the_place_of_a_file_or_an_empty_folder(tmp_path: Path) -> None:
    """And of nothing else."""
    for name in ("new", "empty", "full"):
        (tmp_path / name).mkdir()
    for name in ("new", "full"):
        (tmp_path / name / "one").touch()
    with pytest.raises(OSError, match="not empty"):
        files.move(tmp_path / "new", tmp_path / "full")
    files.move(tmp_path / "new", tmp_path / "empty")
    assert names(tmp_path / "empty") == ["one"]
    files.move(tmp_path / "empty" / "one", tmp_path / "full" / "one")
    assert names(tmp_path / "empty") == []


def test_a_scratch_file_has_no_name(tmp_path: Path) -> None:
    """It is there while it is open."""
    descriptor = files.scratch_file(tmp_path)
    assert names(tmp_path) == []
    assert os.pwrite(descriptor, b"some", 2) == 4
    assert os.fstat(descriptor).st_size == 6
    os.close(descriptor)


# Who may make files without names: data that does not fit in memory, and a folder's own test.
MAKES_SCRATCH_FILES = ("spill", "jit.py")


def local_files_faults(package: Path) -> list[str]:
    """Where a file of `package`, which stands for dlm/, does what `files.py` is for.

    Spark's folder renames through Spark's file system.
    """
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        if path == Path("files.py"):
            continue
        for node in ast.walk(tree_of(file)):
            what = ""
            if isinstance(node, ast.Import):
                what = " ".join(a.name for a in node.names if a.name in ("tempfile", "fcntl"))
            elif isinstance(node, ast.ImportFrom):
                taken = {alias.name for alias in node.names}
                if node.module in ("os", "shutil"):
                    what = " ".join(taken & {"rename", "renames", "replace", "move"})
                elif node.module == "dlm.files" and path.parts[0] not in MAKES_SCRATCH_FILES:
                    what = " ".join(taken & {"scratch_file"})
                elif node.module in ("tempfile", "fcntl"):
                    what = node.module
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                # A string is replaced with two arguments, a dataclass with names.
                alone = len(node.args) == 1 and not node.keywords
                of = getattr(node.func.value, "id", "")
                name = node.func.attr
                if (
                    (name in ("rename", "renames") and path.parts[0] != "spark")
                    or (name == "replace" and (alone or of == "os"))
                    or (name == "move" and of == "shutil")
                    or (name == "scratch_file" and path.parts[0] not in MAKES_SCRATCH_FILES)
                ):
                    what = ast.unparse(node.func)
            if what:
                found.append(f"{path}:{node.lineno} {what}")
    return found


def test_local_files_are_renamed_and_made_for_a_while_in_one_place() -> None:
    """Over every file of dlm/: no rename, no lock and no `tempfile` but in files.py."""
    assert local_files_faults(ROOT / "dlm") == []


@pytest.mark.parametrize(
    ("path", "text", "wrong"),
    [
        ("a.py", "import tempfile", True),
        ("a.py", "import fcntl", True),
        ("a.py", "def f():\n    from tempfile import mkdtemp", True),
        ("a.py", "from os import replace", True),
        ("a.py", "a.with_name('b').replace(b)", True),
        ("a.py", "shutil.move(a, b)", True),
        ("a.py", "from dlm import files\nfiles.scratch_file(a)", True),
        ("files.py", "import tempfile\na.replace(b)", False),
        ("a.py", "'a'.replace('a', 'b')\ndataclasses.replace(a, b=1)\nreplace(a)", False),
        ("spill/a.py", "from dlm.files import scratch_file", False),
        ("spark/folder.py", "context.rename(a, b)", False),
    ],
)
def test_a_planted_rename_is_found(path: str, text: str, wrong: bool, tmp_path: Path) -> None:
    """So that the test above is known to look."""
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
    assert bool(local_files_faults(tmp_path)) is wrong


def test_a_lock_ends_with_its_block_though_a_child_was_forked_in_it(tmp_path: Path) -> None:
    """The child has the open file; another process gets the lock all the same."""
    place = tmp_path / "lock"
    read, write = os.pipe()
    with locked(place):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent closes its end
            os._exit(0)
        with pytest.raises(BlockingIOError), locked(place, BlockingIOError()):
            pass
    try:
        handle = lock_file(place)
        assert handle is not None
        unlock(handle)
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_cache_loses_what_was_used_longest_ago_and_no_process_uses(tmp_path: Path) -> None:
    """By number or by size; what is not an entry stays."""
    entries = [tmp_path / str(age) for age in range(5)]
    for entry in entries:
        entry.mkdir()
        (entry / "file").write_bytes(bytes(1000))
    (tmp_path / "other").mkdir()
    with writer(entries[4], "from dlm.files import claim\nclaim(place)\nwait()") as other:
        assert claim(entries[3])
        for age, entry in enumerate(entries):
            os.utime(entry, (100 - age, 100 - age))
        evict(tmp_path, r"\d", most=4)
        assert names(tmp_path) == ["0", "1", "3", "4", "other"]
        evict(tmp_path, r"\d", most_bytes=3000)
        assert names(tmp_path) == ["0", "3", "4", "other"]
        other.communicate()
    evict(tmp_path, r"\d", most=0)
    assert names(tmp_path) == ["3", "other"]
    assert not claim(entries[0])


def test_a_full_disk_is_named() -> None:
    """The system names no file where it refuses to write more."""
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(full, b"more")
    assert raised.value.filename == "/dev/full"
    with pytest.raises(OSError, match="No space left") as raised, replacing(full) as file:
        file.write(b"more" * 10_000)  # more than its buffer holds
    assert raised.value.filename == "/dev/full"


@pytest.mark.parametrize("fault", [0, errno.EXDEV, errno.EMLINK])
def test_a_file_is_linked_or_copied_where_links_cannot_be(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads to the file is followed: a link to the name would end with it."""
    (tmp_path / "old").write_bytes(b"content")
    (tmp_path / "name").symlink_to("old")

    def refused(*_: object) -> None:
        raise OSError(fault, os.strerror(fault))

    if fault:
        monkeypatch.setattr(os, "link", refused)
    assert link_or_copy(tmp_path / "name", tmp_path / "new") == (not fault)
    assert (tmp_path / "new").read_bytes() == b"content"
    assert not (tmp_path / "new").is_symlink()
    assert (tmp_path / "new").samefile(tmp_path / "old") == (not fault)
