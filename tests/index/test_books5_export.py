"""A real 5-gram model goes into four shards and comes out again, n-gram for n-gram.

The data lies outside the project: DLM_SHARED_DATA, by default ../shared/data beside the checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlm.index.check.decode import export_arpa
from dlm.index.check.verify import verify
from dlm.index.making import build_shard_set

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
ARPA = DATA / "arpa" / "books5.arpa.zst"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ARPA.exists(),
        reason=f"no {ARPA}; name the folder of the shared data in DLM_SHARED_DATA",
    ),
]


def test_books5_comes_back_from_four_shards_ngram_for_ngram(tmp_path: Path) -> None:
    """Four million n-grams: the set has those of the file, and the file that it exports too."""
    build_shard_set(ARPA, tmp_path / "set", 4)
    export_arpa(tmp_path / "set", tmp_path / "out.arpa")
    for arpa in (ARPA, tmp_path / "out.arpa"):
        assert verify(tmp_path / "set", arpa=arpa).ok
