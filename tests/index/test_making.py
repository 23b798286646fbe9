"""What the builder promises: the same bytes, balance, whole folders, and models refused in time."""

from __future__ import annotations

import fcntl
import gzip
import random
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ArpaError, ConfigError
from dlm.index.layout import read_manifest
from dlm.index.making import build_shard_set
from dlm.index.making.stages import GRAM_BYTES, NODE_BYTES
from dlm.index.search.local import LocalModel
from dlm.ngram.backoff import DictModel
from dlm.ngram.partition import SLOTS
from models import HAND_MADE, MISSING_PREFIX, PlainModel, build, contents, random_model


@pytest.mark.promise("same_bytes")
def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    """Nothing of the clock, the machine or the order of a hash table gets in."""
    model = random_model(3, per_order=80).write(tmp_path / "model.arpa")
    first = build_shard_set(model, tmp_path / "one", 3)
    second = build_shard_set(model, tmp_path / "two", 3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert first.text == second.text
    kinds = ("low_orders", *(f"shard-000{i}" for i in range(3)), "vocabulary")
    assert contents(tmp_path / "one").keys() == {"manifest.json", *(f"{x}.arrow" for x in kinds)}


def test_model_id_depends_on_the_model_alone(tmp_path: Path) -> None:
    """Not on shards, compression or the order of lines above the 1-grams; but on every value."""
    model = random_model(4, per_order=60)
    text = model.arpa().encode()
    plain = model.write(tmp_path / "model.arpa")
    packed = tmp_path / "model.arpa.gz"
    packed.write_bytes(gzip.compress(text))
    rows = list(model.ngrams.items())
    longer = [row for row in rows if len(row[0]) > 1]
    random.Random(1).shuffle(longer)
    shuffled = PlainModel(model.order, dict([r for r in rows if len(r[0]) == 1] + longer))
    other = PlainModel(model.order, {**model.ngrams, longer[0][0]: (-0.125, None)})

    ids = {
        build_shard_set(plain, tmp_path / "a", 1).model,
        build_shard_set(plain, tmp_path / "b", 7).model,
        build_shard_set(packed, tmp_path / "c", 2).model,
        build_shard_set(shuffled.write(tmp_path / "s.arpa"), tmp_path / "d", 2).model,
    }
    assert len(ids) == 1
    assert build_shard_set(other.write(tmp_path / "o.arpa"), tmp_path / "e", 2).model not in ids


def test_shard_set_id_leaves_out_where_the_model_came_from(tmp_path: Path) -> None:
    """Another name, compression or comment of the same model: clients keep what they have."""
    model = random_model(4, per_order=60)
    one = build_shard_set(model.write(tmp_path / "one.arpa"), tmp_path / "a", 2)
    (tmp_path / "two.arpa.gz").write_bytes(gzip.compress(b"# later\n" + model.arpa().encode()))
    two = build_shard_set(tmp_path / "two.arpa.gz", tmp_path / "b", 2)
    assert one.shard_set == two.shard_set
    assert one.provenance != two.provenance
    assert one.text != two.text
    assert [f.xxh3_128 for f in one.files] == [f.xxh3_128 for f in two.files]


def test_shard_set_id_tells_any_two_sets_apart(tmp_path: Path) -> None:
    """Another slot table or encoding is another set, whatever the model."""
    model = random_model(4).write(tmp_path / "model.arpa")
    sets = {build_shard_set(model, tmp_path / str(b), b).shard_set for b in (1, 2, 3)}
    for bits in (4, 32):
        manifest = build_shard_set(
            model, tmp_path / f"compact {bits}", 2, encoding="compact", bits=bits
        )
        assert manifest.encoding == "compact"
        sets.add(manifest.shard_set)
    assert len(sets) == 5


def test_shards_are_balanced_by_the_bytes_they_hold(tmp_path: Path) -> None:
    """Within the heaviest pair, which cannot be split."""
    model = random_model(5, order=4, words=40, per_order=6000)
    manifest = read_manifest(build(model, tmp_path, 4))
    held = np.array(
        [NODE_BYTES * f.nodes + GRAM_BYTES * (f.ngrams + f.blanks) for f in manifest.files[2:]]
    )
    assert held.max() < 1.01 * held.mean()


def test_a_recorded_load_is_balanced_instead(tmp_path: Path) -> None:
    """Two slots with all the queries go to two shards."""
    load = np.zeros(SLOTS, np.int64)
    load[[17, 18]] = 1000
    slots = read_manifest(build(random_model(6), tmp_path, 2, slot_load=load)).slots
    assert slots[17] != slots[18]
    with pytest.raises(ConfigError, match="4096"):
        build_shard_set(tmp_path / "model.arpa", tmp_path / "x", 2, slot_load=load[1:])


def test_what_the_manifest_says_of_the_model_and_its_source(tmp_path: Path) -> None:
    """Counts leave the blanks out; the source is named without its folder."""
    model = HAND_MADE["missing_suffixes"]
    (tmp_path / "model.arpa").write_text("# made by hand\n" + model.arpa())
    manifest = build_shard_set(tmp_path / "model.arpa", tmp_path / "set", 2)
    assert manifest.order == 4
    assert manifest.counts == (7, 2, 2, 1)
    assert manifest.blanks == (0, 2, 1, 0)  # b c, c d; b c d
    assert manifest.unk_in_model
    assert manifest.provenance["source"] == "model.arpa"
    assert manifest.provenance["comments"] == ["made by hand"]
    assert not manifest.provenance["repaired"]
    assert read_manifest(tmp_path / "set").text == manifest.text


@pytest.mark.promise("bounds_of_models")
@pytest.mark.parametrize("shards", [0, -1, 4097])
def test_a_number_of_shards_that_cannot_be_is_refused(shards: int, tmp_path: Path) -> None:
    """One slot a shard at most."""
    with pytest.raises(ConfigError, match="shards"):
        build(random_model(1), tmp_path, shards)
    assert [p.name for p in tmp_path.iterdir()] == ["model.arpa"]


def test_shards_that_hold_nothing_do_no_harm(tmp_path: Path) -> None:
    """64 shards, all but one of them empty, answer as one does."""
    model = PlainModel(3, {**HAND_MADE["no_unknown_word"].ngrams})
    local = LocalModel.open(build(model, tmp_path, 64))
    a, b, c = local.vocabulary.ids_of(["a", "b", "c"])
    asked = np.array([[a, b]], np.uint32), np.array([2], np.uint8), np.array([c], np.uint32)
    assert local.score(*asked).log10_prob[0] == np.float32(-0.125)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """A finished build is never overwritten; an empty folder is taken."""
    model = random_model(1).write(tmp_path / "model.arpa")
    (tmp_path / "set").mkdir()
    build_shard_set(model, tmp_path / "set", 1)
    before = contents(tmp_path / "set")
    with pytest.raises(ConfigError, match=f"{tmp_path}/set .*--output"):
        build_shard_set(model, tmp_path / "set", 2)
    with pytest.raises(ConfigError, match=f"{model} .*--output"):
        build_shard_set(model, model, 2)
    assert contents(tmp_path / "set") == before


def test_two_builds_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    """The second is refused while the first holds the lock, and touches nothing."""
    model = random_model(1).write(tmp_path / "model.arpa")
    lock = tmp_path / "set.building.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another build"):
            build_shard_set(model, tmp_path / "set", 1)
    assert lock.exists()
    build_shard_set(model, tmp_path / "set", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.arpa", "set"]


def test_a_malformed_model_leaves_nothing_behind(tmp_path: Path) -> None:
    """No folder, no lock, no half of a set."""
    model = tmp_path / "model.arpa"
    model.write_text(random_model(1).arpa().replace("\\end\\", "\\oops\\"))
    with pytest.raises(ArpaError):
        build_shard_set(model, tmp_path / "set", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["model.arpa"]


@pytest.mark.promise("bounds_of_models")
def test_an_order_that_no_state_length_can_say_is_refused(tmp_path: Path) -> None:
    """Sixteen does not fit four bits."""
    with pytest.raises(ArpaError, match=r"order 16; .*order 15"):
        build(random_model(1, order=16, per_order=2), tmp_path)


@pytest.mark.promise("malformed_arpa")
def test_repair_adds_prefixes_and_changes_no_score(tmp_path: Path) -> None:
    """Each prefix gets the probability that back-off gave it (here exact in binary)."""
    manifest = read_manifest(build(MISSING_PREFIX, tmp_path, repair=True))
    assert manifest.provenance["repaired"]
    assert manifest.counts == (7, 3, 2, 1)  # d c; a b c
    local = LocalModel.open(tmp_path / "set")
    prefixed = {
        **MISSING_PREFIX.ngrams,
        ("d", "c"): (-1.25, None),  # no weight for d; P(c)
        ("a", "b", "c"): (-0.125 - 0.625, None),
    }
    # What back-off says over the n-grams as they stand, missing prefixes and all.
    whole = DictModel.from_arpa(PlainModel(4, prefixed).write(tmp_path / "whole.arpa"))
    ids = whole.vocabulary.id_of
    plain = {
        tuple(map(ids, words)): (np.float32(p), np.float32(b or 0))
        for words, (p, b) in MISSING_PREFIX.ngrams.items()
    }
    from dlm.ngram.backoff import score

    size = len(whole.vocabulary)
    for a in range(size):
        for b in range(size):
            for c in range(size):
                asked = (
                    np.full((size, 3), [a, b, c], np.uint32),
                    np.full(size, 3, np.uint8),
                    np.arange(size, dtype=np.uint32),
                )
                found = local.score(*asked).log10_prob
                wanted = [
                    score(plain, set(), set(), 4, (a, b, c), w).log10_prob for w in range(size)
                ]
                assert found.tolist() == wanted


def test_what_a_killed_repair_left_goes_with_the_next_build(tmp_path: Path) -> None:
    """Of the same folder, whether it repairs or not."""
    left = tmp_path / ".set.building.repaired.1-0123abcd.partial"
    left.mkdir()
    (left / "model.arpa.zst").write_bytes(b"half of it")
    build(random_model(1), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.arpa", "set"]


def test_repair_refuses_a_prefix_of_probability_above_one(tmp_path: Path) -> None:
    """Such a prefix could not be exported, and shows that the model is not normalised."""
    ngrams = {**MISSING_PREFIX.ngrams, ("a", "b"): (-0.5, 2.0)}
    with pytest.raises(ArpaError, match="repaired"):
        build(PlainModel(4, ngrams), tmp_path, repair=True)
