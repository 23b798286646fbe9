"""Words in pieces, from their distribution alone, and back again."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.errors import ConfigError, EstimationError, FormatError, PrivacyError
from dlm.record.counts_file import WordCounts
from dlm.record.provenance import Guarantee, Provenance

pytest.importorskip("sentencepiece", reason="pip install -e '.[train]'")

from dlm.federated.pieces.inventory import (
    BEGIN,
    END,
    SPACE,
    TOTAL,
    UNKNOWN,
    Inventory,
    build_inventory,
    scaled,
    seed_pieces,
)
from dlm.federated.words import record_of

STEMS = [
    "walk",
    "talk",
    "crazy",
    "crazi",
    "commun",
    "nation",
    "read",
    "déj",
    "über",
    "7",
    "i",
    "am",
    "on",
]
ENDS = ["", "s", "ed", "ing", "er", "ly", "ness", "ally", "'s", "ção"]
GOOD = Provenance(Guarantee(1.0, 1e-6, 0.1), stages=({"stage": "unigrams"},))


def distribution(provenance: Provenance = GOOD) -> WordCounts:
    """Stems and endings with clipped (fractional) counts by Zipf's law, short words first."""
    words = [stem + end for stem in STEMS for end in ENDS]
    order = np.random.default_rng(3).permutation(len(words))
    words = ["i", "am", "on", *(words[i] for i in order if words[i] not in ("i", "am", "on"))]
    return WordCounts(tuple(words), 100.25 / np.arange(1.0, len(words) + 1), provenance)


@pytest.fixture(scope="module")
def inventory() -> Inventory:
    """60 pieces."""
    return build_inventory(distribution(), 60)


def test_every_word_comes_back_from_its_pieces(inventory: Inventory) -> None:
    """One by one and all in a row; accented letters, digits and apostrophes among them."""
    words = list(distribution().words)
    assert inventory.size == 60
    for word in words:
        ids = inventory.encode([word])
        assert UNKNOWN not in ids
        assert inventory.decode(ids) == [word]
    ids = inventory.encode(words)
    assert ids.dtype == np.int32
    assert inventory.decode(ids) == words
    assert inventory.encode([]).shape == (0,)


def test_words_that_were_not_counted_are_encoded_if_their_characters_were(
    inventory: Inventory,
) -> None:
    """And a character that was not is unknown, never silently dropped."""
    assert inventory.decode(inventory.encode(["readnessing"])) == ["readnessing"]
    assert UNKNOWN in inventory.encode(["жизнь"])
    assert inventory.decode(inventory.encode(["a", "ж"])) == ["a", "\u2047"]
    assert inventory.pieces()[:3] == ["<unk>", "<s>", "</s>"]
    assert (UNKNOWN, BEGIN, END) == (0, 1, 2)


def test_a_word_takes_the_segmentation_of_highest_probability(inventory: Inventory) -> None:
    """Against the best of all segmentations, found by trying each (FNG 6)."""
    ids = {piece: i for i, piece in enumerate(inventory.pieces()) if i > END}
    score = inventory.log_probabilities()

    def best(text: str) -> float:
        found = [0.0] + [-np.inf] * len(text)
        for end in range(1, len(text) + 1):
            for start in range(end):
                piece = ids.get(text[start:end])
                if piece is not None:
                    found[end] = max(found[end], found[start] + score[piece])
        return found[-1]

    for word in distribution().words:
        taken = sum(score[i] for i in inventory.encode_word(word))
        assert taken == pytest.approx(best(SPACE + word), rel=1e-5)


@pytest.mark.parametrize("size", [500, 1000, 2000])
def test_frequent_words_are_pieces_where_most_words_could_be(size: int) -> None:
    """With every word among the seeds, a frequent word of two letters took three pieces."""
    random = np.random.default_rng(0)
    syllables = [one + vowel for one in "bcdfglmnprst" for vowel in "aeiou"]
    made = ("".join(random.choice(syllables, size=n)) for n in random.integers(1, 5, size=6000))
    words = sorted(list(dict.fromkeys(made))[:3000], key=len)
    zipf = 1e6 / np.arange(1, len(words) + 1)
    counts = WordCounts(tuple(words), zipf, GOOD)
    inventory = build_inventory(counts, size)
    assert [len(inventory.encode_word(word)) for word in words[:5]] == [1] * 5
    assert inventory.pieces_per_word(counts) < 2


def test_seeds_are_weighted_substrings_that_stand_on_their_own() -> None:
    """Against every substring counted plainly."""
    words, weights = ["ab", "abc", "xbc", "b"], np.array([5, 3, 2, 7])
    plain: dict[str, int] = {}
    for word, weight in zip(words, weights.tolist(), strict=True):
        text = SPACE + word
        for start in range(len(text)):
            for end in range(start + 2, len(text) + 1):
                plain[text[start:end]] = plain.get(text[start:end], 0) + weight
    alone = {
        piece: n
        for piece, n in plain.items()
        if not any(m == n and len(o) == len(piece) + 1 and piece in o for o, m in plain.items())
    }
    found = seed_pieces(words, weights, 1000, 16)
    assert dict(found) == alone
    assert len(found) == len(alone)
    cover = [n * len(piece) for piece, n in found]
    assert cover == sorted(cover, reverse=True)
    assert seed_pieces(words, weights, 2, 16) == found[:2]
    assert max(len(piece) for piece, _ in seed_pieces(words, weights, 1000, 3)) == 3


def test_fractional_counts_keep_their_ratios() -> None:
    """And what is rare still counts once."""
    whole = scaled(np.array([3.0, 1.5, 1e-12]))
    assert whole.tolist() == [round(TOTAL * 2 / 3), round(TOTAL / 3), 1]


def test_counts_near_the_ends_of_floating_point_keep_their_ratios() -> None:
    """Their sum is infinite, or what it is multiplied by."""
    for tiny_or_huge in (1.5e308, 1e-320):
        values = np.array([tiny_or_huge, tiny_or_huge])
        assert scaled(values).tolist() == [TOTAL // 2, TOTAL // 2]
        assert WordCounts(("a", "b"), values, GOOD).probabilities().tolist() == [0.5, 0.5]


def test_an_inventory_inherits_what_protects_its_counts(tmp_path: Path) -> None:
    """A guarantee or none, through the file too; a model under another's record is refused."""
    raw = build_inventory(distribution(Provenance.none("without noise")), 60)
    assert raw.provenance.reasons == ("without noise",)
    assert raw.provenance.derived == ("wordpieces 60",)
    raw.save(tmp_path / "raw.model")
    assert Inventory.load(tmp_path / "raw.model").provenance == raw.provenance
    good = build_inventory(distribution(), 60)
    assert good.provenance.guarantee == GOOD.guarantee
    good.save(tmp_path / "good.model")
    back = Inventory.load(tmp_path / "good.model")
    assert back.provenance == good.provenance
    assert back.pieces() == good.pieces()
    other = build_inventory(distribution(), 50)
    (tmp_path / "good.model").write_bytes(other.model)
    with pytest.raises(PrivacyError, match=r"good\.model\.provenance"):
        Inventory.load(tmp_path / "good.model")
    (tmp_path / "good.model.provenance.json").unlink()
    assert Inventory.load(tmp_path / "good.model").provenance.guarantee is None
    (tmp_path / "good.model").write_bytes(b"no model")
    with pytest.raises(FormatError, match="not a SentencePiece model"):
        Inventory.load(tmp_path / "good.model")


def test_what_is_not_shown_to_be_of_its_record_has_none() -> None:
    """Objects that look like wordpieces, and wordpieces in memory with the record of others."""
    known, other = build_inventory(distribution(), 60), build_inventory(distribution(), 50)
    assert record_of(known.encode) == known.provenance

    class Derived(Inventory):
        """Says that it is one."""

    class Lookalike:
        """Has all that wordpieces have."""

        provenance, model = known.provenance, known.model

        def encode(self, words: list[str]) -> Any:
            """Ids."""
            return known.encode(words)

    for owner in (Derived(known.model, known.provenance), Lookalike()):
        assert "nothing says whose text" in record_of(owner.encode).reasons[0]
    for record in (other.provenance, GOOD):
        changed = dataclasses.replace(known, provenance=record)
        assert "is of other wordpieces" in record_of(changed.encode).reasons[0]


def test_the_same_counts_give_the_same_inventory() -> None:
    """To the byte, so that a run can be checked; and it names no file of this machine."""
    model = build_inventory(distribution(), 60).model
    assert model == build_inventory(distribution(), 60).model
    assert b"words.tsv" not in model and b"seeds.tsv" not in model


@pytest.mark.parametrize(
    "word", ["a b", "a▁b", "\u2585", "", "tab\there", "nul\0", "<s>", "</s>", "x<unk>"]
)
def test_a_word_that_could_not_come_back_is_refused(word: str) -> None:
    """Before anything is estimated."""
    counts = WordCounts(("good", word), np.array([2.0, 1.0]), GOOD)
    with pytest.raises(ConfigError, match="remove it from the list"):
        build_inventory(counts, 60)


def test_sizes_that_the_words_do_not_give_are_refused() -> None:
    """Too many pieces, and fewer than there are characters."""
    with pytest.raises(EstimationError, match=r"at most \d+ are possible\. Give a smaller size"):
        build_inventory(distribution(), 5000)
    with pytest.raises(EstimationError, match="different characters, which"):
        build_inventory(distribution(), 20)
    with pytest.raises(EstimationError, match="cannot make 2147483648"):
        build_inventory(distribution(), 1 << 31)
    with pytest.raises(ConfigError, match="4 or more"):
        build_inventory(distribution(), 3)


def test_a_size_of_the_characters_alone_gives_them(inventory: Inventory) -> None:
    """The least there is: marks, the beginning of a word, and each character once."""
    letters = {c for word in distribution().words for c in word}
    least = build_inventory(distribution(), len(letters) + 4)
    assert sorted(least.pieces()[3:]) == sorted({*letters, SPACE})
    with pytest.raises(EstimationError, match="do not fit"):
        build_inventory(distribution(), len(letters) + 3)


def test_what_cannot_be_written_leaves_what_was_there(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full before the record: the model before, with its record, and no more."""
    before = build_inventory(distribution(), 50)
    before.save(tmp_path / "x.model")
    syncs = iter([None, OSError(errno.ENOSPC, "No space left on device")])

    def fsync(handle: int) -> None:
        if (error := next(syncs)) is not None:
            raise error

    monkeypatch.setattr("dlm.files.os.fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        inventory.save(tmp_path / "x.model")
    assert Inventory.load(tmp_path / "x.model").provenance == before.provenance
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_stop_while_an_inventory_is_written_never_lends_it_anothers_record(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Killed after so many names were changed: the old with its record, or some without any."""
    path = tmp_path / "x.model"
    raw = dataclasses.replace(inventory, provenance=Provenance.none("without noise"))
    inventory.save(path)
    done: list[str] = []

    def step(name: str, change: Any) -> Any:
        def changed(*given: Any, **more: Any) -> Any:
            if len(done) == steps:
                raise KeyboardInterrupt
            done.append(name)
            return change(*given, **more)

        return changed

    for name in ("unlink", "replace"):
        monkeypatch.setattr(Path, name, step(name, getattr(Path, name)))
    with pytest.raises(KeyboardInterrupt):
        raw.save(path)
    monkeypatch.undo()
    assert (Inventory.load(path).provenance.guarantee is not None) == (steps == 0)


def test_a_word_longer_than_a_line_of_sentencepiece_is_kept() -> None:
    """It would be left out in silence, and its characters with it."""
    long = "ö" * 5000
    counts = WordCounts((*distribution().words, long), np.append(distribution().counts, 5.0), GOOD)
    inventory = build_inventory(counts, 60)
    assert inventory.decode(inventory.encode([long])) == [long]
