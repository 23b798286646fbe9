"""The bytes predicted for a model are near those of the set that is built."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import pytest

from dlm.index.build import build_shard_set
from dlm.index.estimate import estimate_bytes, measure


@pytest.mark.parametrize(
    ("encoding", "bits", "shards"),
    [("exact", None, 1), ("exact", None, 3), ("compact", 8, 1), ("compact", None, 2)],
)
def test_an_estimate_is_within_a_tenth_of_the_set(
    encoding: str, bits: int | None, shards: int, tmp_path: Path
) -> None:
    """On the real model that comes with the package."""
    with as_file(files("dlm") / "data" / "books20k.arpa.zst") as arpa:
        expected = estimate_bytes(measure(arpa), shards, encoding, bits)
        manifest = build_shard_set(arpa, tmp_path / "set", shards, encoding=encoding, bits=bits)
    found = sum(entry.bytes for entry in manifest.files) + len(manifest.text)
    assert abs(expected / found - 1) < 0.1, (expected, found)
