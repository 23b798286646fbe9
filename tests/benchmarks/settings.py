"""What the environment names, and the files made from it: shard sets, KenLM binaries, workloads.

DLM_SHARED_DATA    folder of the shared data, by default ../shared/data beside the checkout
DLM_BENCH_ARPA     ARPA files, separated by ':', by default arpa/books5.arpa.zst of it
DLM_BENCH_TEXT     text that queries are made from, by default text/gutenberg.txt.zst of it
DLM_BENCH_HELDOUT  text of the perplexities, by default text/reuters21578.txt.zst of it
DLM_BENCH_CACHE    folder where what was made is kept for the next run, else a temporary one
DLM_KENLM_BIN      folder of KenLM's build_binary and query
DLM_KENLM_DRIVER   kenlm_driver.cc, compiled
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pyarrow as pa

import dlm
from benchmarks.workload import SEED, Mix, Workload, from_text, lines_of, spoken

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
ARPA_FILES = [
    Path(name)
    for name in os.environ.get("DLM_BENCH_ARPA", str(DATA / "arpa" / "books5.arpa.zst")).split(":")
]
TEXT = Path(os.environ.get("DLM_BENCH_TEXT", DATA / "text" / "gutenberg.txt.zst"))
HELD_OUT = Path(os.environ.get("DLM_BENCH_HELDOUT", DATA / "text" / "reuters21578.txt.zst"))
HELD_OUT_LINES = 50_000

# KenLM's data structures: what kenlm_driver.cc calls each, and what makes build_binary build it.
KENLM_KINDS = {
    "probing": ("probing", ["probing"]),
    "trie": ("trie", ["trie"]),
    "trie -a 22": ("array_trie", ["-a", "22", "trie"]),
    "trie -q 8 -b 8": ("quant_trie", ["-q", "8", "-b", "8", "trie"]),
    "trie -q 8 -b 8 -a 22": ("quant_array_trie", ["-q", "8", "-b", "8", "-a", "22", "trie"]),
}
QUANTISED = {kind for kind in KENLM_KINDS if "-q" in kind}
ENCODINGS = ("exact", "compact")
DLM = [sys.executable, "-c", "from dlm.cli.main import main; main()"]


class MissingError(Exception):
    """What a row needs is not here; the message says what and how to name it."""


@cache
def cache_folder() -> Path:
    """DLM_BENCH_CACHE, else a folder that goes away with the process."""
    named = os.environ.get("DLM_BENCH_CACHE")
    if named:
        Path(named).mkdir(parents=True, exist_ok=True)
        return Path(named)
    folder = Path(tempfile.mkdtemp(prefix="dlm-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def kenlm_tool(name: str) -> Path:
    """The path of one of KenLM's programs."""
    folder = os.environ.get("DLM_KENLM_BIN")
    if not folder:
        raise MissingError(f"no KenLM {name}: name the folder of KenLM's programs in DLM_KENLM_BIN")
    if not (Path(folder) / name).exists():
        raise MissingError(f"DLM_KENLM_BIN is {folder}, which has no {name}")
    return Path(folder) / name


def kenlm_driver() -> Path:
    """The path of kenlm_driver, compiled."""
    named = os.environ.get("DLM_KENLM_DRIVER")
    if not named:
        raise MissingError("no kenlm_driver: compile kenlm_driver.cc, name it in DLM_KENLM_DRIVER")
    if not Path(named).exists():
        raise MissingError(f"DLM_KENLM_DRIVER is {named}, which does not exist")
    return Path(named)


def arpa_files() -> list[Path]:
    """The models, each of which exists."""
    for path in (*ARPA_FILES, TEXT):
        _existing(path)
    return ARPA_FILES


def title(arpa: Path) -> str:
    """A model's name: its file's, without what the format adds."""
    return arpa.name.split(".arpa")[0]


@cache
def plain_arpa(arpa: Path) -> Path:
    """The model as KenLM reads it, and as both are given it: not compressed."""
    if arpa.suffix == ".arpa":
        return _existing(arpa)
    kind = {".zst": "zstd", ".gz": "gzip"}[arpa.suffix]
    path = cache_folder() / f"{title(arpa)}-{_stamp(_existing(arpa))}.arpa"
    if not path.exists():
        source = pa.CompressedInputStream(pa.OSFile(str(arpa)), kind)
        with source, _whole(path) as part, part.open("wb") as out:
            shutil.copyfileobj(source, out)
    return path


@cache
def shard_set(arpa: Path, encoding: str) -> Path:
    """A shard set of one shard; one kept from before serves as long as dlm's code is the same."""
    source = hashlib.sha256()
    package = Path(dlm.__file__).parent
    for path in sorted(package.rglob("*.py")):
        source.update(path.read_bytes())
    name = f"{title(arpa)}-{_stamp(_existing(arpa))}-{encoding}"
    folder = cache_folder() / f"{name}-{source.hexdigest()[:12]}"
    if not folder.exists():
        for stale in cache_folder().glob(f"{name}-*"):
            shutil.rmtree(stale)
        run(shard_command(arpa, encoding, folder))
    return folder


def shard_command(arpa: Path, encoding: str, output: Path) -> list[str]:
    """The command that shards a model in one."""
    command = [*DLM, "shard", str(plain_arpa(arpa)), "--shards", "1", "--output", str(output)]
    if encoding == "exact":
        return command
    if not _knows_encodings():
        raise MissingError(f"dlm shard has no --encoding; {encoding} cannot be built")
    return [*command, "--encoding", encoding]


@cache
def _knows_encodings() -> bool:
    return "--encoding" in run([*DLM, "shard", "--help"])


@cache
def kenlm_binary(arpa: Path, kind: str) -> Path:
    """KenLM's binary of a model, with its words' strings, as build_binary makes it by default."""
    path = cache_folder() / f"{title(arpa)}-{_stamp(_existing(arpa))}-{kind.replace(' ', '')}.kenlm"
    if not path.exists():
        with _whole(path) as part:
            run(kenlm_command(arpa, kind, part))
    return path


def kenlm_command(arpa: Path, kind: str, output: Path) -> list[str]:
    """The command that builds a KenLM binary."""
    flags = KENLM_KINDS[kind][1]
    return [str(kenlm_tool("build_binary")), *flags, str(plain_arpa(arpa)), str(output)]


@cache
def workload() -> Workload:
    """The questions of every row."""
    return from_text(_existing(TEXT))


@cache
def workload_file() -> Path:
    """The same, for kenlm_driver."""
    mix = hashlib.sha256(repr((SEED, Mix())).encode()).hexdigest()[:8]
    path = cache_folder() / f"{TEXT.name.split('.')[0]}-{_stamp(_existing(TEXT))}-{mix}.workload"
    with _whole(path) as part:
        workload().write(part)
    return path


@cache
def held_out() -> list[bytes]:
    """Sentences of the held-out text."""
    sentences = (" ".join(spoken(line)).encode() for line in lines_of(_existing(HELD_OUT)))
    return [s for s in sentences if s][:HELD_OUT_LINES]


def run(command: list[str], text: bytes | None = None) -> str:
    """Runs a command to its end; what it prints to standard output.

    Raises
        RuntimeError  it failed; with the end of what it said
    """
    done = subprocess.run(command, input=text, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return done.stdout.decode()


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file that appears whole or not at all: written beside its place, then renamed."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        yield part
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise MissingError(f"no {path}; see tests/benchmarks/settings.py for the variables")
    return path


def _stamp(path: Path) -> str:
    stat = path.stat()
    return hashlib.sha256(repr((stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()[:8]
