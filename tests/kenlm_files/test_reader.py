"""KenLM's files back to n-grams: tries are read, hash tables searched; build_binary made GOLDEN."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ConfigError, DlmError, KenlmFormatError
from dlm.kenlm.invert import Effort, needed_bytes
from dlm.kenlm.layout import REFERENCE, is_kenlm_file, open_file
from dlm.kenlm.open import open_ngrams
from dlm.kenlm.reader import KenlmReader
from dlm.kenlm.write import export_ngrams
from dlm.ngram.arpa.header import provenance_facts
from dlm.ngram.backoff import DictModel

GOLDEN = Path(__file__).parent / "golden"
ARPA = {"demo": GOLDEN / "demo.arpa", "tiny": GOLDEN.parents[2] / "shards/tiny/tiny.arpa"}
FILES = sorted(path.name for path in GOLDEN.glob("*.binary"))
EXACT = [name for name in FILES if "quant" not in name]

Words = tuple[bytes, ...]


def ngrams_of(reader: object) -> dict[Words, tuple[np.float32, np.float32]]:
    """All n-grams by their words."""
    found = {}
    with reader:
        batches = list(reader.batches())
        words = reader.vocabulary.words
        for batch in batches:
            rows = zip(batch.ids.tolist(), batch.log10_prob, batch.log10_backoff, strict=True)
            found |= {tuple(words[i] for i in ids): (p, b) for ids, p, b in rows}
        assert len(found) == sum(map(len, batches)) == sum(reader.counts)
    return found


def opened(name: str, tmp_path: Path, **options: object) -> KenlmReader:
    """A golden file, with its words where it stores none."""
    listed = None
    if "-v." in name:
        listed = tmp_path / "words.txt"
        with open_ngrams(ARPA[name.split(".")[0]]) as arpa:
            list(arpa.batches())
            listed.write_bytes(b"\n".join([*arpa.vocabulary.words, b"not-in-it"]))
    return open_ngrams(GOLDEN / name, vocab=listed, **options)


@pytest.mark.promise("kenlm_ngrams")
@pytest.mark.parametrize("name", FILES)
def test_all_ngrams_come_back_with_their_bits(name: str, tmp_path: Path) -> None:
    """Those of the ARPA file, and blanks, which have no weight and are at most suffixes."""
    given = ngrams_of(open_ngrams(ARPA[name.split(".")[0]]))
    reader = opened(name, tmp_path)
    found = ngrams_of(reader)
    if name in EXACT:
        assert {ngram: found.get(ngram) for ngram in given} == given
    blanks = found.keys() - given.keys()
    assert given.keys() <= found.keys()
    assert all(found[ngram][1] == 0 for ngram in blanks)
    assert all(
        any(longer[-len(b) :] == b for longer in given if len(longer) > len(b)) for b in blanks
    )
    if reader.blanks is not None:
        assert sum(reader.blanks) == len(blanks)


@pytest.mark.promise("kenlm_ngrams")
@pytest.mark.parametrize("name", FILES)
def test_exported_ngrams_score_as_the_file(name: str, tmp_path: Path) -> None:
    """Blanks and quantised values too, to the last bits of float32."""
    export_ngrams(opened(name, tmp_path), tmp_path / "back.arpa")
    model = DictModel.from_arpa(tmp_path / "back.arpa")
    kind = f"{name.split('.')[0]}.{'exact' if name in EXACT else 'quantised'}"
    wanted = json.loads((GOLDEN / "expected.json").read_text())[kind]
    lines = (GOLDEN / "sentences.txt").read_bytes().splitlines()
    for line, scores in zip(lines, wanted["full_scores"], strict=True):
        ids = model.vocabulary.ids_of([b"<s>", *line.split(), b"</s>"]).tolist()
        ours = [
            float(model.score(tuple(ids[max(0, i - model.order + 1) : i]), ids[i]).log10_prob)
            for i in range(1, len(ids))
        ]
        assert ours == pytest.approx([score[0] for score in scores], abs=1e-5)


@pytest.mark.promise("kenlm_ngrams")
@pytest.mark.parametrize("name", ["tiny.probing.binary", "demo.quant.binary", "demo.rest.binary"])
def test_provenance_says_what_the_file_does_not_hold(name: str, tmp_path: Path) -> None:
    """Blanks by order where they are known; values before quantisation; rest costs."""
    lines: list[str] = []
    reader = opened(name, tmp_path, progress=lines.append)
    ngrams_of(reader)
    (comment,) = reader.comments
    facts = provenance_facts(comment)
    assert facts is not None
    assert facts["from"] == name
    known = {"tiny.probing.binary": [0, 1, 1, 0], "demo.rest.binary": [0, 0, 0]}
    assert facts["blanks"] == known.get(name)
    assert ("the values before quantisation" in facts["lost"]) == ("quant" in name)
    assert ("the rest costs" in facts["lost"]) == ("rest" in name)
    said = [line for line in lines if facts["lost"][0] in line]
    assert len(said) == 1


@pytest.mark.promise("kenlm_damaged")
@pytest.mark.parametrize("name", ["demo.probing.binary", "tiny.rest.binary"])
def test_arrays_beyond_the_memory_limit_are_files(name: str, tmp_path: Path) -> None:
    """The same n-grams in the same order; below what must be memory, it is refused."""
    _, layout = open_file(GOLDEN / name)
    _, least = needed_bytes(layout)
    roomy, tight = (
        open_ngrams(GOLDEN / name),
        open_ngrams(GOLDEN / name, memory_bytes=least, folder=tmp_path),
    )
    for one, other in zip(roomy.batches(), tight.batches(), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.log10_prob, other.log10_prob)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=f"{least:,}"):
        ngrams_of(open_ngrams(GOLDEN / name, memory_bytes=least - 1))


@pytest.mark.promise("kenlm_damaged")
def test_a_search_beyond_the_limit_of_time_is_refused() -> None:
    """After an estimate; without a limit it goes on."""
    path = GOLDEN / "demo.probing.binary"

    def reader(limit_s: float | None) -> KenlmReader:
        return KenlmReader(path, effort=Effort(1 << 30, None, limit_s), progress=lambda line: None)

    with pytest.raises(ConfigError, match="--force"):
        ngrams_of(reader(0.0))
    assert ngrams_of(reader(None))


def first_bucket(data: bytes, path: Path, order: int) -> int:
    """The place of the first used bucket of an order."""
    _, layout = open_file(path)
    level = layout.levels[order - 2]
    places = range(level.at, level.at + level.entries * level.entry_size, level.entry_size)
    return next(at for at in places if any(data[at : at + 8]))


def another_key(data: bytearray, path: Path) -> None:
    """A key of no n-gram."""
    at = first_bucket(data, path, 2)
    data[at : at + 8] = struct.pack("<Q", 0x0123456789ABCDEF)


def another_flag(data: bytearray, path: Path) -> None:
    """All words lose the sign that something longer ends in them."""
    _, layout = open_file(path)
    for i in range(layout.words):
        data[layout.unigrams_at + layout.unigram_bytes * i + 3] |= 0x80


def not_a_number(data: bytearray, path: Path) -> None:
    """A weight that is NaN."""
    _, layout = open_file(path)
    at = layout.unigrams_at + layout.unigram_bytes
    data[at + 4 : at + 8] = struct.pack("<f", float("nan"))


def huge_multiplier(data: bytearray, path: Path) -> None:
    """More buckets than a float32 can say."""
    at = len(REFERENCE) + 4
    data[at : at + 4] = struct.pack("<f", 3e38)


def falling_pointer(data: bytearray, path: Path) -> None:
    """A word whose 2-grams begin before those of the word before it."""
    _, layout = open_file(path)
    at = layout.unigrams_at + layout.unigram_bytes * 5 + 8
    data[at : at + 8] = struct.pack("<Q", 0)


def far_pointer(data: bytearray, path: Path) -> None:
    """A word whose 2-grams begin beyond the last."""
    _, layout = open_file(path)
    at = layout.unigrams_at + layout.unigram_bytes * 5 + 8
    data[at : at + 8] = struct.pack("<Q", 1 << 62)


def ones(data: bytearray, path: Path) -> None:
    """The highest order is all ones: words that are not there."""
    _, layout = open_file(path)
    level = layout.levels[-1]
    size = (level.count * level.entry_size) // 8
    data[level.at : level.at + size] = b"\xff" * size


@pytest.mark.promise("kenlm_damaged")
@pytest.mark.parametrize(
    ("name", "damage", "section"),
    [
        ("demo.probing.binary", another_key, "2-grams"),
        ("demo.rest.binary", another_flag, "2-grams"),
        ("demo.probing.binary", huge_multiplier, "1-grams"),
        ("demo.probing.binary", not_a_number, "1-grams"),
        ("demo.trie.binary", not_a_number, "1-grams"),
        ("demo.trie.binary", falling_pointer, "2-grams"),
        ("demo.array.binary", far_pointer, "2-grams"),
        ("demo.quant.binary", ones, "3-grams"),
        ("demo.array.binary", ones, "3-grams"),
    ],
)
def test_a_damaged_file_is_refused(
    name: str, damage: Callable[[bytearray, Path], None], section: str, tmp_path: Path
) -> None:
    """And an output that was there stays."""
    data = bytearray((GOLDEN / name).read_bytes())
    damage(data, GOLDEN / name)
    path, output = tmp_path / name, tmp_path / "out.arpa"
    path.write_bytes(data)
    output.write_text("before")
    with pytest.raises(KenlmFormatError) as error:
        export_ngrams(open_ngrams(path), output)
    assert error.value.section == section
    assert error.value.path == str(path)
    assert output.read_text() == "before"


@pytest.mark.promise("kenlm_damaged")
@pytest.mark.parametrize("name", ["tiny.probing.binary", "demo.quant-array.binary"])
def test_no_flipped_byte_does_more_than_change_ngrams(name: str, tmp_path: Path) -> None:
    """Any single byte: a model, or an error of ours."""
    data = (GOLDEN / name).read_bytes()
    path = tmp_path / name
    for at in range(0, len(data), max(1, len(data) // 80)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            with open_ngrams(path) as reader:
                for batch in reader.batches():
                    assert int(batch.ids.max()) < len(reader.vocabulary)
        except DlmError:
            pass


def test_a_kenlm_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Whatever its name; an ARPA file named .binary is read as one. A pipe is left unopened."""
    shutil.copy(GOLDEN / "demo.trie.binary", tmp_path / "model.arpa")
    shutil.copy(GOLDEN / "demo.arpa", tmp_path / "model.binary")
    assert is_kenlm_file(tmp_path / "model.arpa")
    assert not is_kenlm_file(tmp_path / "model.binary")
    assert not is_kenlm_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert not is_kenlm_file(tmp_path / "pipe")
    assert ngrams_of(open_ngrams(tmp_path / "model.arpa")) == ngrams_of(
        open_ngrams(tmp_path / "model.binary")
    )
