"""Objects fetched into the cache: in parts, once, whole or not at all."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlm.errors import ConfigError, FormatError, UnavailableError
from dlm.stores import fetching
from dlm.stores.fetching import fetch_object
from dlm.stores.remote import located, put_file
from stores.servers import Files

PART = 1 << 16
CONTENT = random.Random(4).randbytes(10 * PART + 5)
# Fetches a URL with small parts, as a process of its own.
PROGRAM = f"""
import sys
from dlm.stores import fetching
from dlm.stores.remote import located
fetching.PART_BYTES, fetching.AT_ONCE = {PART}, 1
print(fetching.fetch_object(located(sys.argv[1]), print))
"""


@pytest.fixture
def url(files: Files, monkeypatch) -> str:
    monkeypatch.setattr(fetching, "PART_BYTES", PART)
    files.content["/m.bin"] = CONTENT
    return f"{files.address}/m.bin"


def start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("size", [0, 1, PART, len(CONTENT)])
def test_an_object_is_fetched_in_parts_once(files: Files, url, size) -> None:
    """A second call reads nothing of it; another content is another file."""
    files.content["/m.bin"] = CONTENT[:size]
    found = fetch_object(located(url))
    assert found.read_bytes() == CONTENT[:size] and found.name == "m.bin"
    assert len(files.parts("/m.bin")) == -(-size // PART)
    assert fetch_object(located(url)) == found
    assert len(files.parts("/m.bin")) == -(-size // PART)
    files.content["/m.bin"] = b"other"
    assert fetch_object(located(url)).read_bytes() == b"other" and found.exists()


def test_a_killed_fetch_goes_on_where_it_was(files: Files, url) -> None:
    """Nothing is there before all of it is; each part is asked about once."""
    held: list[str] = []

    def hold(handler) -> bool:
        if handler.headers.get("Range") and len(files.parts("/m.bin")) > 5:
            held.append(handler.path)
            time.sleep(5)
        return False

    files.fault = hold
    process = start(url)
    while not held:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not list((fetching.home()).rglob("m.bin"))
    files.fault = lambda handler: False
    files.asked.clear()
    assert fetch_object(located(url)).read_bytes() == CONTENT
    assert len(files.parts("/m.bin")) <= 6


def test_of_several_processes_one_fetches_and_the_others_wait(files: Files, url) -> None:
    def slow(handler) -> bool:
        time.sleep(0.05)
        return False

    files.fault = slow
    ended = [one.communicate()[0] for one in [start(url) for _ in range(3)]]
    assert len({text.splitlines()[-1] for text in ended}) == 1
    assert Path(ended[0].splitlines()[-1]).read_bytes() == CONTENT
    assert len(files.parts("/m.bin")) == 11


def change(files: Files) -> None:
    """Another content from the sixth part on."""

    def fault(handler) -> bool:
        if len(files.parts("/m.bin")) == 5:
            files.content["/m.bin"] = CONTENT[::-1]
        return False

    files.fault = fault


def cut(files: Files) -> None:
    def fault(handler) -> bool:
        if not handler.headers.get("Range"):
            return False
        files.send(handler, 206, b"xx", {"Content-Range": f"bytes 0-1/{len(CONTENT)}"})
        return True

    files.fault = fault


def fail(files: Files) -> None:
    def fault(handler) -> bool:
        if handler.headers.get("Range"):
            files.send(handler, 500, b"")
            return True
        return False

    files.fault = fault


@pytest.mark.parametrize(
    ("what", "error"), [(change, FormatError), (cut, UnavailableError), (fail, UnavailableError)]
)
def test_a_fault_is_an_error_and_the_next_run_has_the_right_bytes(
    files: Files, url, what, error
) -> None:
    """Of an object that changes, is cut, or comes no further."""
    what(files)
    with pytest.raises(error, match=r"m\.bin"):
        fetch_object(located(url))
    assert not list((fetching.home()).rglob("m.bin"))
    files.fault, files.content["/m.bin"] = (lambda handler: False), CONTENT
    assert fetch_object(located(url)).read_bytes() == CONTENT


def test_a_store_that_is_down_is_answered_from_the_cache(files: Files, url) -> None:
    """With a line that says so; without a copy, it is an error."""
    found = fetch_object(located(url))

    def refuse(handler) -> bool:
        files.send(handler, 500, b"")
        return True

    files.fault, told = refuse, []
    assert fetch_object(located(url), told.append) == found
    assert any(str(fetching.home()) in line for line in told)
    with pytest.raises(UnavailableError):
        fetch_object(located(f"{files.address}/other.bin"))


def test_a_disk_that_is_full_is_an_error_and_leaves_no_file(url) -> None:
    """The limit of a process stands for the end of the disk."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    done = subprocess.run(
        [sys.executable, "-c", code + PROGRAM, url], capture_output=True, text=True
    )
    assert done.returncode == 1 and "DLM_CACHE_DIR" in done.stderr
    assert not list((fetching.home()).rglob("m.bin"))


def test_the_cache_keeps_to_its_bound(files: Files, cache, monkeypatch) -> None:
    """What no process uses goes, the least recently used first."""
    files.content |= {f"/{name}.bin": bytes(300_000) + name.encode() for name in "abc"}
    monkeypatch.setenv("DLM_CACHE_SIZE", "700K")
    for name in "abc":
        done = start(f"{files.address}/{name}.bin").communicate()[0]
        assert done
    assert sorted(one.name for one in fetching.home().rglob("*.bin")) == ["b.bin", "c.bin"]


def test_a_model_of_the_hub_comes_from_where_it_points_without_the_token(
    files: Files, monkeypatch
) -> None:
    """And is compared with the digest that the hub says. A local server stands in for the hub: it
    answers as its documentation says."""
    content = Files()
    try:
        content.content["/blob"] = CONTENT
        path = "/org/name/resolve/v2/en.bin"
        digest = hashlib.sha256(CONTENT).hexdigest()
        files.links[path] = f"{content.address}/blob", {"X-Linked-ETag": f'"{digest}"'}
        monkeypatch.setenv("HF_ENDPOINT", files.address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        found = fetch_object(located("hf://org/name@v2/en.bin"))
        assert found.read_bytes() == CONTENT
        assert all(one.get("authorization") == "Bearer hf_secret" for _, _, one in files.asked)
        assert content.asked and not any("authorization" in one for _, _, one in content.asked)
        content.content["/blob"] = CONTENT[:-1] + b"\0"
        with pytest.raises(FormatError, match="sha256"):
            fetch_object(located("hf://org/name@v2/en.bin"))
    finally:
        content.close()


def test_a_damaged_object_is_refused(bucket, tmp_path) -> None:
    """Who pushed it said its digest."""
    file = tmp_path / "m.bin"
    file.write_bytes(CONTENT)
    put_file(located(f"{bucket}/m.bin"), file, "0" * 32)
    with pytest.raises(FormatError, match="xxh3"):
        fetch_object(located(f"{bucket}/m.bin"))
    with pytest.raises(ConfigError):
        fetch_object(located(bucket.replace("s3://", "http://me:pw@")))
