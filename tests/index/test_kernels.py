"""The kernel gives the oracle's bits on any model in any number of shards.

Of models made by hand, and of quantised ones, see `test_everything.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dlm.index.check.decode import export_arpa
from dlm.index.making import build_shard_set
from dlm.index.search.local import LocalModel
from dlm.ngram.backoff import DictModel
from models import PlainModel, assert_equals_oracle, build, queries, random_model

LOSSLESS: list[dict[str, Any]] = [{}, {"encoding": "compact", "bits": 32}]


def compare(model: PlainModel, folder: Path, shards: int, count: int, **options: Any) -> None:
    """Builds `model` and compares `count` answers with the oracle's.

    The oracle is that of the file, or, where values are quantised, of what the set exports; that
    is then sharded again, exactly, and asked the same.
    """
    local = LocalModel.open(build(model, folder, shards, **options))
    arpa = folder / "model.arpa"
    if options.get("bits", 32) != 32:
        arpa = folder / "export.arpa"
        export_arpa(folder / "set", arpa)
        build_shard_set(arpa, folder / "exact", shards % 5 + 1)
    oracle = DictModel.from_arpa(arpa)
    asked = queries(oracle, count)
    assert_equals_oracle(local.score(*asked), oracle, *asked)
    if arpa.name == "export.arpa":
        again = LocalModel.open(folder / "exact")
        assert again.manifest.model == local.manifest.model
        assert_equals_oracle(again.score(*asked), oracle, *asked)


@pytest.mark.parametrize("options", [*LOSSLESS, {"encoding": "compact", "bits": 3}], ids=repr)
def test_kernel_gives_the_bits_of_the_oracle_where_lists_are_long(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Hundreds of words after one: directories, blocks of offsets, and whole lists."""
    rng = random.Random(3)
    words = [f"w{i}" for i in range(400)]
    ngrams: dict[tuple[str, ...], tuple[float, float | None]] = {
        (word,): (-1 - i / 512, -i / 1024)
        for i, word in enumerate(["<unk>", "<s>", "</s>", *words])
    }
    for first, size in (("w0", 400), ("w1", 300), ("w2", 9), ("w3", 8), ("w4", 17), ("w5", 64)):
        for word in rng.sample(words, size):
            ngrams[first, word] = (-rng.randrange(1, 999) / 512, rng.choice([None, -0.25]))
    longer = [n for n in ngrams if len(n) == 2 and n[1] in ("w0", "w1", "w4", "w5")]
    for pair in longer:
        shorter = [n[1] for n in ngrams if len(n) == 2 and n[0] == pair[1]]
        whole = rng.random() < 0.5
        for word in shorter if whole else rng.sample(shorter, rng.randrange(len(shorter))):
            ngrams[*pair, word] = (-rng.randrange(1, 999) / 1024, None)
    compare(PlainModel(3, ngrams), tmp_path, 2, 2000, **options)


def test_kernel_reads_what_a_read_only_map_holds(tmp_path: Path) -> None:
    """Columns map files; a signature compiled for writable arrays would not take them."""
    local = LocalModel.open(build(random_model(1), tmp_path))
    assert not any(column.flags.writeable for column in local.low.arrays.values())
    assert not any(c.flags.writeable for s in local.shards for c in s.arrays.values())
