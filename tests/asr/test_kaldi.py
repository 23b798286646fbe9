"""Kaldi's lattices: what is read, what is written, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr.plain import all_paths, random_lattice, words_of
from dlm.asr.rescoring.kaldi import SymbolTable, kaldi_text, read_kaldi
from dlm.errors import ConfigError, DlmError, LatticeError

ARCHIVE = """utt-1
0 1 1 3.25,10.5,1_2_3
0 2 2 1,2,
1 3 3 0.5,-4,7
2 3 3
3 0.25,1.5,9_9
1

utt-2
0 1 4 2 1.5,2.5
1 2 0 3 Infinity
1 2 5 3 0.5,0.5
2
"""
WORDS = "<eps> 0\nthe 1\na 2\nman 3\n#0 4\n"


@pytest.fixture
def table(tmp_path: Path) -> SymbolTable:
    """Of words.txt."""
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return SymbolTable.read(path)


def written(folder: Path, text: str) -> Path:
    """An archive with this text."""
    path = folder / "lat.txt"
    path.write_text(text)
    return path


def test_costs_words_and_transitions_are_read(tmp_path: Path, table: SymbolTable) -> None:
    """Weights that are left out are zero; a final weight is an arc into the end."""
    text = ARCHIVE.replace("1 2 0 3 Infinity\n", "")
    one, other = read_kaldi(written(tmp_path, text), table)
    assert (one.id, other.id) == ("utt-1", "utt-2")
    assert sorted(words_of(one, path) for path in all_paths(one)) == [
        ("a", "man"),
        ("the",),
        ("the", "man"),
    ]
    by_label = dict(
        zip(one.labels, zip(one.acoustic, one.lm, one.details, strict=True), strict=True)
    )
    assert by_label["the"] == (-10.5, -3.25, "1_2_3")
    assert by_label["a"] == (-2.0, -1.0, "")
    assert one.acoustic[one.targets == one.end].tolist() == [0.0, -1.5]
    # With transition-ids in a column of their own.
    assert other.labels == ("a", "man", "")
    assert other.details == ("4", "5", "")
    assert other.lm.tolist() == [-1.5, -0.5, 0.0]


def test_labels_may_be_words(tmp_path: Path) -> None:
    """Then no table is needed; numbers need one."""
    (found,) = read_kaldi(written(tmp_path, "u\n0 1 the 1,2,\n1 2 <eps> 1,2,\n2\n"))
    assert found.labels == ("the", "<eps>", "")
    with pytest.raises(ConfigError, match=r"line 2: .*words\.txt"):
        list(read_kaldi(written(tmp_path, "u\n0 1 5 1,2,\n1\n")))


@pytest.mark.parametrize("seed", range(10))
def test_what_is_written_is_read_as_it_was(tmp_path: Path, seed: int) -> None:
    """By words and by numbers; every score by its bits."""
    table = SymbolTable(
        *({"0": "<eps>", "1": "x", "2": "!SIL"}, {"<eps>": "0", "x": "1", "!SIL": "2"})
    )
    lattice = random_lattice(seed, words=["x"])
    for words in (None, table):
        (again,) = read_kaldi(written(tmp_path, kaldi_text(lattice, words)), words)
        assert again.id == lattice.id
        assert sorted(words_of(again, p) for p in all_paths(again)) == sorted(
            words_of(lattice, p) for p in all_paths(lattice)
        )
        assert sorted([*again.acoustic, *again.lm]) == sorted(
            [*lattice.acoustic, *lattice.lm] + [0.0] * 2 * (again.arcs - lattice.arcs)
        )
        assert kaldi_text(again, words) == kaldi_text(
            next(read_kaldi(written(tmp_path, kaldi_text(again, words)), words)), words
        )


def test_a_word_that_the_table_lacks_is_an_error_that_does_not_say_it(table: SymbolTable) -> None:
    """Nothing of what was said is in a message."""
    lattice = random_lattice(0, words=["secret"])
    with pytest.raises(ConfigError, match="'utt-0'") as caught:
        kaldi_text(lattice, table)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("found", "instead", "told"),
    [
        ("utt-1\n", "utt-1 0\n", "line 1: .* id "),
        ("0 1 1", "0 x 1", "line 2: a state is not a number"),
        ("0 1 1", "0 1 99", "line 2: .* label "),
        ("3.25,10.5", "3.25,nan", "line 2: .*3.25 and .*nan"),
        ("3.25,10.5,1_2_3", "3.25,", "line 2: .*3.25 and .*empty"),
        ("0.5,-4,7", "0.5,-4,7 8 9", "line 4: .*6 fields"),
        ("2 3 3\n", "2 3 3\n3 0 3\n", "cycle"),
        ("1 3 3 ", "1 1 3 ", "line 4: .* to itself"),
        ("3 0.25,1.5,9_9\n1\n", "", "final"),
        ("3 0.25,1.5,9_9\n1\n", "3 Infinity,Infinity,\n", "final"),
        (
            "1 2 0 3 Infinity",
            "1 2 0 3 Infinity,1",
            "line 11: .*Infinity and .*1",
        ),
        ("utt-2", "\nutt-3\n\nutt-2", "utt-3"),
    ],
)
def test_a_malformed_archive_is_refused_where_it_is_wrong(
    tmp_path: Path, table: SymbolTable, found: str, instead: str, told: str
) -> None:
    """With the file, and the line where there is one."""
    assert found in ARCHIVE
    path = written(tmp_path, ARCHIVE.replace(found, instead))
    with pytest.raises(LatticeError, match=told) as caught:
        list(read_kaldi(path, table))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [("the\n", "line 1: "), ("a 1\nb 1\n", "line 2: number 1 .*twice")],
)
def test_a_malformed_symbol_table_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """Where it is wrong."""
    with pytest.raises(DlmError, match=told):
        SymbolTable.read(written(tmp_path, text))
