"""The bytes predicted for a model are near those of the set that is built."""

from __future__ import annotations

import re
import tracemalloc
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from cluster import ProcessServer
from dlm.index.describe import PROCESS_MIB
from dlm.index.making import build_shard_set
from dlm.index.search.local import LocalModel
from dlm.index.sizes import estimate_sizes, measure
from dlm.ngram.vocab import Vocabulary
from dlm.server.compiling import compile_kernels


@pytest.mark.parametrize(
    ("encoding", "bits", "shards"),
    [("exact", None, 3), ("compact", 8, 1)],
)
def test_an_estimate_is_within_a_tenth_of_the_set(
    encoding: str, bits: int | None, shards: int, tmp_path: Path
) -> None:
    """On the real model that comes with the package."""
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        expected = estimate_sizes(measure(arpa), shards, encoding, bits)
        manifest = build_shard_set(arpa, tmp_path / "set", shards, encoding=encoding, bits=bits)
    found = sum(entry.bytes for entry in manifest.files) + len(manifest.text)
    assert abs(expected.disk / found - 1) < 0.1, (expected, found)
    for kind, bytes_ in (("vocabulary", expected.vocabulary), ("low_orders", expected.low_orders)):
        assert abs(bytes_ / manifest.file(kind).bytes - 1) < 0.15, kind
    trees = [entry.bytes for entry in manifest.files if entry.kind == "shard"]
    assert abs(expected.shard * shards / sum(trees) - 1) < 0.15


def test_an_estimate_of_memory_is_that_of_a_real_server_and_of_a_clients_words(
    tmp_path: Path,
) -> None:
    """A warm server's resident memory is below what is told, and above half of it; a client's words
    take what is told, within a fifth."""
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        expected = estimate_sizes(measure(arpa), 2, "exact")
        build_shard_set(arpa, tmp_path / "set", 2)
    compile_kernels()  # a server that has to compile takes more
    with ProcessServer(tmp_path / "set", 0, preload=True).ready() as server:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        resident = 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])  # type: ignore[index]
    told = expected.shard + PROCESS_MIB * (1 << 20)
    assert told / 2 < resident < told, (resident, told)
    words = list(LocalModel.open(tmp_path / "set").vocabulary.words)
    tracemalloc.start()
    vocabulary = Vocabulary([bytes(bytearray(word)) for word in words], unk_in_model=True)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(vocabulary) == expected.words[1]
    of_words = expected.client - expected.vocabulary - expected.low_orders
    assert abs(of_words / held - 1) < 0.2, (of_words, held)
