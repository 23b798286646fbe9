"""A real 5-gram model goes into four shards and comes out again, n-gram for n-gram.

The data lies outside the project: DLM_SHARED_DATA, by default ../shared/data beside the checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dlm.index.check.decode import export_arpa
from dlm.index.making import build_shard_set
from dlm.index.ngrams import NgramTables, read_raw, sorted_tables
from dlm.ngram.arpa import ArpaReader
from index.oracle import numbered

DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
ARPA = DATA / "arpa" / "books5.arpa.zst"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ARPA.exists(),
        reason=f"no {ARPA}; name the folder of the shared data in DLM_SHARED_DATA",
    ),
]


def tables_of(path: Path) -> NgramTables:
    """The n-grams of an ARPA file, sorted, with the ids that a shard set gives its words."""
    with ArpaReader(path) as reader:
        raw = read_raw(reader)
        return sorted_tables(*numbered(reader.vocabulary, raw), reader)


def test_books5_comes_back_from_four_shards_ngram_for_ngram(tmp_path: Path) -> None:
    """Four million n-grams: the same words, ids and bits."""
    build_shard_set(ARPA, tmp_path / "set", 4)
    export_arpa(tmp_path / "set", tmp_path / "out.arpa")
    before, after = tables_of(ARPA), tables_of(tmp_path / "out.arpa")
    assert after.vocabulary == before.vocabulary
    assert after.counts() == before.counts()
    for ours, theirs in zip(after.tables, before.tables, strict=True):
        assert (ours.rows == theirs.rows).all()
        for name in ("log10_prob", "log10_backoff"):
            one, two = getattr(ours, name), getattr(theirs, name)
            assert (one.view(np.uint32) == two.view(np.uint32)).all()
