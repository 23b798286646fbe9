"""The words of KenLM's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlm.errors import ConfigError, FormatError, KenlmFormatError
from dlm.kenlm.layout import open_file, read_layout
from dlm.kenlm.view import find_ids, make_view, words_of
from dlm.ngram.wordtable import WordTable

GOLDEN = Path(__file__).parent / "golden"
WORDS = {"tiny": 7, "demo": 175}
STORED = sorted(path.name for path in GOLDEN.glob("*.binary") if "-v" not in path.name)
WITHOUT = sorted(path.name for path in GOLDEN.glob("*-v.binary"))


def read(name: str, words: Path | None = None) -> WordTable:
    """The words of a golden file."""
    data, layout = open_file(GOLDEN / name)
    return words_of(data, layout, make_view(data, layout), words)


def words_of_model(name: str) -> list[bytes]:
    """The words of a model, as its ARPA file has them."""
    model = name.split(".")[0]
    path = Path("shards/tiny/tiny.arpa") if model == "tiny" else GOLDEN / "demo.arpa"
    section = path.read_bytes().split(b"\\1-grams:\n")[1].split(b"\n\n")[0]
    return [line.split(b"\t")[1] for line in section.split(b"\n")]


@pytest.mark.parametrize("name", STORED)
def test_stored_words_have_the_ids_of_their_hashes(name: str) -> None:
    """Those of probing files are in the order of the ARPA file."""
    found = read(name).words()
    expected = words_of_model(name)
    assert found[0] == b"<unk>"
    assert sorted(found) == sorted(expected)
    if "trie" not in name and "quant" not in name and "array" not in name:
        assert found == expected


@pytest.mark.parametrize("name", WITHOUT)
def test_a_list_gives_words_back_by_their_hashes(name: str, tmp_path: Path) -> None:
    """In any order, with words that the model lacks; but each only once, and all of them."""
    with pytest.raises(ConfigError, match="vocab=FILE"):
        read(name)
    words = words_of_model(name)
    listed = tmp_path / "words.txt"
    listed.write_bytes(b"\n".join([b"zebra", *reversed(words)]) + b"\n")
    table = read(name, listed)
    assert sorted(table.words()) == sorted(words)
    data, layout = open_file(GOLDEN / name)
    ids = find_ids(make_view(data, layout), [*table.words(), b"zebra", b"<UNK>", b""])
    assert ids.tolist() == [*range(len(words)), 0, 0, 0]
    listed.write_bytes(b"\n".join([*words, words[3]]))
    with pytest.raises(FormatError, match=f"line {len(words) + 1}"):
        read(name, listed)
    listed.write_bytes(b"\n".join(words[:-2]))
    with pytest.raises(FormatError, match="lacks 2 of"):
        read(name, listed)


@pytest.mark.parametrize("name", ["demo.probing.binary", "demo.trie.binary"])
def test_damaged_words_are_refused_with_their_place(name: str) -> None:
    """One that has another hash, one that occurs twice, one too many, and a cut file."""
    data = np.fromfile(GOLDEN / name, np.uint8)
    layout = read_layout(data, name)
    assert layout.words_at is not None
    ends = np.flatnonzero(data[layout.words_at :] == 0) + layout.words_at
    for i, change, told in ((1, b"x", "word 2"), (1, b"\0", "176 words"), (173, b"", "174 words")):
        damaged = data.copy()
        at = int(ends[i]) + 1
        damaged[at : at + len(change)] = list(change)
        damaged = damaged if change else damaged[:at]
        found = read_layout(damaged, name)
        with pytest.raises(KenlmFormatError, match=told):
            words_of(damaged, found, make_view(damaged, found))
