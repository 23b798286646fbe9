"""The builder gives the bytes of the one with everything in memory, however little it has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.errors import ArpaError, ConfigError
from dlm.index import making
from dlm.index.coding import ValueHistogram
from dlm.index.layout import Manifest
from dlm.index.making.budget import Budget
from dlm.resources import available_bytes, parse_size
from index.oracle import build_whole
from models import HAND_MADE, MISSING_PREFIX, PlainModel, contents, random_model

MIB = 1 << 20
# Blocks of five rows, runs of seven, and three of them merged at once.
TINY = Budget(True, 8 * MIB, 8 * MIB, block_rows=5, capacity_rows=7)
CODINGS = [("exact", None), ("compact", None), ("compact", 3), ("compact", 32)]
CODINGS_OF = {1: CODINGS[::3], 2: CODINGS[:2], 5: CODINGS[::2]}  # by shards


def quickly(models: Iterable[str], *quick: str) -> list[Any]:
    """Their names, those beyond `quick` slow."""
    slow = pytest.mark.slow
    return [name if name in quick else pytest.param(name, marks=slow) for name in models]


def check(path: Path, folder: Path, shards: int, encoding: str, bits: int | None) -> Manifest:
    """Builds both ways, and compares."""
    plain = build_whole(path, folder / "plain", shards, encoding=encoding, bits=bits)
    streamed = making.build_shard_set(path, folder / "stream", shards, encoding=encoding, bits=bits)
    assert contents(folder / "stream") == contents(folder / "plain")
    assert streamed.text == plain.text
    assert sorted(p.name for p in folder.iterdir() if p != path) == ["plain", "stream"]
    return streamed


MODELS = {
    **HAND_MADE,
    **{f"random_{n}": random_model(n, order=3 + n % 3, per_order=150) for n in range(3)},
    "random_without_unk": random_model(7, order=5, per_order=120, unk=False),
    "closed": random_model(8, order=4, per_order=200, missing_suffixes=False),
}


SPILLED = (
    *("five_grams_deep_suffixes_missing", "empty_top_orders", "unigrams_only"),
    *("unknown_word_in_longer_ngrams", "random_without_unk", "closed"),
)


@pytest.mark.promise("memory_and_reshard")
@pytest.mark.parametrize("shards", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *((name, None) for name in MODELS),
        *(
            pytest.param(name, TINY, marks=() if name in SPILLED else pytest.mark.slow)
            for name in MODELS
        ),
    ],
)
def test_the_bytes_are_those_of_the_plain_form(
    name: str, budget: Budget | None, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, as small models are built, and where everything spills: in blocks of five rows
    every group of rows is cut somewhere."""
    if budget is not None:
        monkeypatch.setattr(Budget, "of", classmethod(lambda *_: budget))
    for i, coding in enumerate(CODINGS_OF[shards]):
        (tmp_path / str(i)).mkdir()
        (path := tmp_path / str(i) / "m.arpa").write_text(MODELS[name].unsorted())
        check(path, path.parent, shards, *coding)


REPAIRED = {
    **HAND_MADE,
    "missing_prefixes": MISSING_PREFIX,
    "random": random_model(4, order=4, per_order=150),
    "random_without_unk": random_model(7, order=5, per_order=120, unk=False),
}


@pytest.mark.parametrize("spills", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", quickly(REPAIRED, "missing_suffixes", "missing_prefixes"))
def test_a_repaired_model_gives_the_bytes_of_the_plain_form(
    name: str, spills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source, checksum and comments are those of the file that lacked the prefixes."""
    if spills:
        monkeypatch.setattr(Budget, "of", classmethod(lambda *_: TINY))
    path = tmp_path / "m.arpa"
    path.write_text("# by hand\n" + REPAIRED[name].arpa())
    for i, (encoding, bits) in enumerate(CODINGS[:2]):
        options = {"encoding": encoding, "bits": bits, "repair": True}
        build_whole(path, tmp_path / f"plain {i}", 2, **options)
        found = making.build_shard_set(path, tmp_path / f"set {i}", 2, **options)
        making.build_shard_set(path, tmp_path / f"far {i}", 2, spill=tmp_path / "spill", **options)
        assert contents(tmp_path / f"set {i}") == contents(tmp_path / f"plain {i}")
        assert contents(tmp_path / f"far {i}") == contents(tmp_path / f"plain {i}")
        assert found.provenance["repaired"] and found.provenance["comments"] == ["by hand"]
        assert list((tmp_path / "spill").iterdir()) == []
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.slow
@pytest.mark.parametrize("coding", CODINGS[::2])
def test_a_larger_model_in_little_memory(coding: tuple[str, int | None], tmp_path: Path) -> None:
    """Blocks and runs of ordinary size, many of each."""
    path = random_model(5, order=5, words=2000, per_order=20_000).write(tmp_path / "m.arpa")
    budget = Budget(True, 8 * MIB, 8 * MIB, block_rows=1024, capacity_rows=3_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "of", classmethod(lambda *_: budget))
        check(path, tmp_path, 3, *coding)


def broken(model: PlainModel, change: str) -> str:
    """The text of a model with n-grams that stand twice, or without their prefixes."""
    lines = model.unsorted().split("\n")
    for k in (3, 4):
        first = lines.index(f"\\{k}-grams:") + 1
        count = lines.index(next(line for line in lines if line.startswith(f"ngram {k}=")))
        rows = int(lines[count].split("=")[1])
        if change == "twice":
            lines[first + rows : first + rows] = [lines[first + 5], lines[first + 2]]
            lines[count] = f"ngram {k}={rows + 2}"
        elif k == 3:
            longer = "\n".join(lines[lines.index("\\4-grams:") :])
            needed = [
                i for i in range(first, first + rows) if f"\t{lines[i].split(chr(9))[1]} " in longer
            ]
            for i in (needed[7], needed[2]):
                del lines[i]
            lines[count] = f"ngram {k}={rows - 2}"
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("change", "repair"), [("twice", False), ("twice", True), ("missing", False)]
)
@pytest.mark.parametrize("spills", [False, True])
def test_the_error_is_that_of_the_plain_form(
    change: str, spills: bool, repair: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Message, order, line and byte: the first in the file."""
    if spills:
        monkeypatch.setattr(Budget, "of", classmethod(lambda *_: TINY))
    path = tmp_path / "m.arpa"
    path.write_text(broken(random_model(1, per_order=200), change))
    with pytest.raises(ArpaError) as plain:
        build_whole(path, tmp_path / "plain", 2, repair=repair)
    with pytest.raises(ArpaError) as streamed:
        making.build_shard_set(path, tmp_path / "set", 2, repair=repair)
    assert str(streamed.value) == str(plain.value)
    assert streamed.value.line == plain.value.line is not None
    assert [p.name for p in tmp_path.iterdir()] == ["m.arpa"]


def test_a_table_is_given_up_where_it_is_too_large() -> None:
    """Or where it saves nothing."""
    some = ValueHistogram(4, np.uint32)
    some.add(np.array([5, 9] * 100, np.uint32))
    assert some.code(32).table.tolist() == [5, 9]
    some.add(np.arange(3, dtype=np.uint32))
    assert (some.code(32).bits, some.code(32).table.tolist()) == (32, [])
    few = ValueHistogram(100, np.uint32)
    few.add(np.arange(5, dtype=np.uint32))
    assert few.code(32).table.tolist() == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("800M", 800 << 20), ("1G", 1 << 30), ("1.5GiB", 3 << 29), ("12", 12), ("7 kb", 7 << 10)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    """As people write them."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "1X", "-1G", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """With an example."""
    with pytest.raises(ConfigError, match="800M"):
        parse_size(text)


def test_some_memory_is_available() -> None:
    """On the machine of the test."""
    assert available_bytes() > MIB


def test_too_little_memory_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """The message says how much is needed."""
    path = random_model(1).write(tmp_path / "m.arpa")
    with pytest.raises(ConfigError, match=f"{MIB:,} bytes; "):
        making.build_shard_set(path, tmp_path / "set", 1, memory_bytes=MIB)
    assert [p.name for p in tmp_path.iterdir()] == ["m.arpa"]
