"""A set made from another one has the bytes of a build from the model with the same slot table."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.errors import ConfigError, ShardFormatError
from dlm.index.check.verify import verify
from dlm.index.making import build_shard_set
from dlm.index.making.budget import Budget
from dlm.index.making.work import JOURNAL
from dlm.index.moving.plan import plan_slots
from dlm.index.moving.reshard import Resharded, reshard
from dlm.index.moving.subtrees import SourceSet
from dlm.ngram.partition import balanced_slot_table
from models import HAND_MADE, PlainModel, random_model

MIB = 1 << 20
BLANKS = random_model(2, order=5, per_order=150)
MODELS = {
    **HAND_MADE,
    "order_3": random_model(0, order=3, per_order=150),
    "without_unk": random_model(7, order=5, per_order=120, unk=False),
    "closed": random_model(8, order=4, per_order=200, missing_suffixes=False),
}
DATA = Path(os.environ.get("DLM_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
BOOKS5 = DATA / "arpa" / "books5.arpa.zst"
BOOKS20K = Path(__file__).parents[3] / "dlm" / "data" / "books20k.arpa.zst"
Usage = namedtuple("Usage", "total used free")


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a folder by name; the manifest without its provenance, which says who made the
    set, and without the checksum over it."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    found["manifest.json"] = json.loads(found["manifest.json"])
    for name in ("provenance", "check"):
        del found["manifest.json"][name]
    return found


def moved(before: Path, after: Path, shards: int, **more: Any) -> tuple[Resharded, SourceSet]:
    """Plans by bytes, and makes the set."""
    source = SourceSet.open(before)
    size = source.slot_bytes()
    choice = {name: more.pop(name) for name in ("removed", "bound") if name in more}
    plan = plan_slots(source.manifest.slots, size, shards, **choice)
    return reshard(source, plan.after, shards, after, size, **more), source


def check(arpa: Path, folder: Path, encoding: str, bits: int | None) -> None:
    """3 -> 4 -> 3 servers, without the second; then one is replaced. Each is compared."""
    options: dict[str, Any] = {"encoding": encoding, "bits": bits}
    before = folder / "set"
    first = build_shard_set(arpa, before, 3, **options)
    replaced = {"bound": 9.0}  # no slot moves, however small the model is
    for step, (shards, choice) in enumerate([(4, {}), (3, {"removed": [1]}), (3, replaced)]):
        after, expected = folder / f"after {step}", folder / f"expected {step}"
        found, source = moved(before, after, shards, **choice)
        slots = found.manifest.slots
        built = build_shard_set(arpa, expected, shards, slots=slots, **options)
        assert contents(after) == contents(expected)
        assert found.manifest.shard_set == built.shard_set
        assert found.manifest.provenance["resharded_from"] == source.manifest.shard_set
        assert found.manifest.provenance["comments"] == first.provenance["comments"]
        assert verify(after).ok
        before = after
    assert not found.made  # a replaced server takes the files as they are
    assert found.manifest.shard_set == source.manifest.shard_set


CODINGS = [("exact", None), ("compact", 3)]


@pytest.mark.promise("memory_and_reshard")
@pytest.mark.parametrize(("encoding", "bits"), CODINGS)
def test_the_bytes_are_those_of_a_build(encoding: str, bits: int | None, tmp_path: Path) -> None:
    """Blanks, quantised values, and a slot with nothing in it."""
    check(BLANKS.write(tmp_path / "m.arpa"), tmp_path, encoding, bits)


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "bits"), [*CODINGS, ("compact", 32)])
@pytest.mark.parametrize("name", MODELS)
def test_so_they_are_of_all_kinds_of_models(
    name: str, encoding: str, bits: int | None, tmp_path: Path
) -> None:
    """Orders 1 and 2, which have no roots, empty orders, and a missing unknown word."""
    check(MODELS[name].write(tmp_path / "m.arpa"), tmp_path, encoding, bits)


@pytest.mark.promise("memory_and_reshard")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arpa", "encoding"), [(BOOKS20K, "exact"), (BOOKS5, "compact")], ids=["books20k", "books5"]
)
def test_so_they_are_of_real_models(arpa: Path, encoding: str, tmp_path: Path) -> None:
    """0.4 and 4 million n-grams."""
    if not arpa.exists():
        pytest.skip(f"no {arpa}; name the folder of the shared data in DLM_SHARED_DATA")
    check(arpa, tmp_path, encoding, None)


def test_it_does_not_matter_where_the_rows_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five roots at a time."""
    tiny = Budget(False, 8 * MIB, 8 * MIB, block_rows=5)
    arpa = BLANKS.write(tmp_path / "m.arpa")
    build_shard_set(arpa, tmp_path / "set", 3)
    monkeypatch.setattr(Budget, "in_memory", classmethod(lambda *_: tiny))
    found, _ = moved(tmp_path / "set", tmp_path / "after", 4)
    monkeypatch.undo()
    build_shard_set(arpa, tmp_path / "expected", 4, slots=found.manifest.slots)
    assert contents(tmp_path / "after") == contents(tmp_path / "expected")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A set of four shards."""
    build_shard_set(BLANKS.write(tmp_path / "m.arpa"), tmp_path / "set", 4)
    return tmp_path / "set"


def test_the_weight_of_slots_is_what_a_build_balances_by(small: Path) -> None:
    """So the table of the build follows from it."""
    source = SourceSet.open(small)
    assert (balanced_slot_table(source.slot_bytes(), 4) == source.manifest.slots).all()


@pytest.mark.promise("memory_and_reshard")
def test_only_shards_whose_slots_change_are_made(small: Path, tmp_path: Path) -> None:
    """The others are the old files, under the numbers that they have now."""
    source = SourceSet.open(small)
    slots = source.manifest.slots.copy()
    slots[slots == 1] = 0
    slots[slots == 3] = 1
    found = reshard(source, slots, 3, tmp_path / "after", source.slot_bytes())
    assert found.made == ("shard-0000.arrow",)
    for new, old in (("shard-0001", "shard-0003"), ("shard-0002", "shard-0002")):
        assert (tmp_path / f"after/{new}.arrow").samefile(small / f"{old}.arrow")
    assert verify(tmp_path / "after").ok


def stop_at(words: str) -> Any:
    """A progress callback that ends the work as Ctrl-C does."""

    def progress(line: str) -> None:
        if words in line:
            raise KeyboardInterrupt

    return progress


@pytest.mark.promise("memory_and_reshard")
def test_an_interrupted_run_goes_on_after_the_last_finished_file(
    small: Path, tmp_path: Path
) -> None:
    """Until then there is no set; another change of the set starts over."""
    source = SourceSet.open(small)
    after, size = tmp_path / "after", source.slot_bytes()
    plans = {n: plan_slots(source.manifest.slots, size, n).after for n in (3, 5)}
    expected = reshard(source, plans[5], 5, tmp_path / "expected", size).manifest
    for shards in (3, 5, 5):
        with pytest.raises(KeyboardInterrupt):
            stop = stop_at("making shard-0002")
            reshard(source, plans[shards], shards, after, size, progress=stop)
        assert not after.exists()
        assert (tmp_path / "after.building" / JOURNAL).exists()
    said: list[str] = []
    found = reshard(source, plans[5], 5, after, size, progress=said.append)
    assert "resuming an earlier build after shard-0001.arrow" in said
    assert not any("shard-0001" in line for line in said[1:] if "making" in line)
    assert found.manifest.text == expected.text
    assert contents(after) == contents(tmp_path / "expected")
    assert len(found.made) == 5
    assert not (tmp_path / "after.building").exists()


@pytest.mark.parametrize("name", ["shard-0002.arrow", "low_orders.arrow", "vocabulary.arrow"])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_set_that_is_not_whole_is_refused(small: Path, name: str, damage: str) -> None:
    """Every file is checked, those that would only be linked too."""
    place = small / name
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.unlink()
    if damage == "changed":
        place.write_bytes(data)
    with pytest.raises(ShardFormatError, match=name):
        SourceSet.open(small)


@pytest.mark.parametrize("fault", ["output", "memory", "disk"])
def test_what_cannot_be_done_is_refused_and_nothing_is_left(
    small: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that exists, too little memory, and a disk without room."""
    after = tmp_path / "after"
    memory = 100 * MIB if fault == "memory" else None
    said = {"output": "after exists", "memory": "104,857,600", "disk": "only 3 "}[fault]
    if fault == "output":
        after.mkdir()
        (after / "note").touch()
    if fault == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 7, 3))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=said):
        moved(small, after, 5, memory_bytes=memory)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_build_with_a_slot_table_of_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    """A shard that is not there cannot own a slot."""
    arpa = PlainModel(1, {("<unk>",): (-1.0, None)}).write(tmp_path / "m.arpa")
    with pytest.raises(ConfigError, match="up to 2"):
        build_shard_set(arpa, tmp_path / "set", 2, slots=np.full(4096, 2, np.uint16))
