"""KenLM files written here, against those that its own build_binary made of the same models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ConfigError
from dlm.index.ngrams import Raw, read_raw
from dlm.kenlm.layout import open_file
from dlm.kenlm.open import open_ngrams
from dlm.kenlm.write import write_probing
from dlm.ngram.vocab import Vocabulary

GOLDEN = Path(__file__).parent / "golden"
ARPA = {"demo": GOLDEN / "demo.arpa", "tiny": GOLDEN.parents[2] / "shards/tiny/tiny.arpa"}


def read(path: Path) -> tuple[Vocabulary, Raw]:
    """All n-grams of a file."""
    with open_ngrams(path) as reader:
        raw = read_raw(reader)
    return reader.vocabulary, raw


def sections(path: Path) -> list[bytes]:
    """The parts of a probing file; of a table, its buckets in order of their content."""
    data, layout = open_file(path)
    first = layout.unigrams_at
    found = [data[: layout.hashes_at].tobytes()]
    tables = [(layout.hashes_at, layout.hashes, 12)]
    tables += [(level.at, level.entries, level.entry_size) for level in layout.levels]
    for at, count, size in tables:
        buckets = data[at : at + count * size].reshape(count, size)
        found.append(buckets[np.lexsort(buckets.T)].tobytes())
    return [*found, data[first : layout.levels[0].at].tobytes(), data[layout.words_at :].tobytes()]


@pytest.mark.promise("kenlm_ngrams")
@pytest.mark.parametrize(("name", "multiplier"), [("demo", 1.5), ("tiny", 3.0)])
def test_the_file_is_that_of_build_binary(name: str, multiplier: float, tmp_path: Path) -> None:
    """Byte for byte; blanks, which KenLM enters between other n-grams, may lie in other buckets."""
    vocabulary, raw = read(ARPA[name])
    blanks = write_probing(tmp_path / "ours", vocabulary, raw, multiplier=multiplier)
    golden = GOLDEN / f"{name}.probing.binary"
    assert sections(tmp_path / "ours") == sections(golden)
    if not sum(blanks):
        assert (tmp_path / "ours").read_bytes() == golden.read_bytes()


def test_tables_have_room_for_blanks(tmp_path: Path) -> None:
    """More buckets than asked for, where KenLM would refuse; the file reads as it should."""
    vocabulary, raw = read(ARPA["tiny"])
    blanks = write_probing(tmp_path / "ours", vocabulary, raw, multiplier=1.0)
    with open_ngrams(tmp_path / "ours") as reader:
        back = read_raw(reader)
    assert [len(ids) for ids, _, _ in back] == [
        len(ids) + blank for (ids, _, _), blank in zip(raw, blanks, strict=True)
    ]


def test_a_model_that_kenlm_refuses_is_refused(tmp_path: Path) -> None:
    """Order 1; an n-gram without its context; blanks where no n-gram makes room for them. Nothing
    is written."""
    vocabulary, raw = read(ARPA["demo"])
    ids, prob, backoff = raw[1]
    for model in (raw[:1], [raw[0], (ids[:1], prob[:1], backoff[:1]), raw[2]]):
        with pytest.raises(ConfigError):
            write_probing(tmp_path / "ours", vocabulary, model)
    a, b = ids[0]
    none, turns = ids[:0, [0, 1, 1]], np.array([[a, b, a, b], [b, a, b, a]], np.uint32)
    pairs = np.array([[a, b], [b, a]], np.uint32)
    values = prob[:2], np.zeros(2, np.float32)
    model = [raw[0], (pairs, *values), (none, prob[:0], prob[:0]), (turns, values[0], None)]
    with pytest.raises(ConfigError):
        write_probing(tmp_path / "ours", vocabulary, model)
    assert list(tmp_path.iterdir()) == []


def test_a_word_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    """It would end the word in the file, which neither dlm nor KenLM could then open."""
    vocabulary, raw = read(ARPA["demo"])
    words = [word + b"\0" * (i == 7) for i, word in enumerate(vocabulary.words)]
    with pytest.raises(ConfigError):
        write_probing(tmp_path / "ours", Vocabulary(words, unk_in_model=True), raw)
    assert list(tmp_path.iterdir()) == []
