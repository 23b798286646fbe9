"""HTK lattices: what is read, what is written, what is refused."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from asr.plain import all_paths, random_lattice, words_of
from dlm.asr.rescoring.lattice import Scales
from dlm.asr.rescoring.slf import read_slf, slf_text, utterance_id
from dlm.errors import LatticeError

ON_LINKS = r"""# words on links, logarithms of base 10
VERSION=1.0
UTTERANCE="/data/a 1.mfc"
base=10 lmscale=12.5
acscale=0.5 wdpenalty=-2
N=3 L=3
I=0 t=0.00
I=1 time=0.5
I=2 t=1.25
J=0 S=0 E=1 W=the v=2 a=-2 l=-1
J=1 START=0 END=1 WORD=\'cause acoustic=-3 language=-0.5 n=-0.25
J=2 S=1 E=2 W="m\"a\156" d=":a,0.5:" a=-4 r=-0.125 p=0.5
"""

# As pocketsphinx writes them: words on nodes, the last node first.
ON_NODES = """VERSION=1.0
start=2
end=0
#
N=3 L=2
I=0 t=2.00 W=!SENT_END v=1
I=1 t=1.00 W=man v=1
I=2 t=0.00 W=the v=1
J=0 S=2 E=1 a=-2.5 p=1
J=1 S=1 E=0 a=-1.5 p=1
"""


def written(folder: Path, text: str) -> Path:
    """A file with this text."""
    path = folder / "a.slf"
    path.write_text(text)
    return path


def test_words_and_scores_of_links_are_read(tmp_path: Path) -> None:
    """Short and long names, quotes and escapes, another base, scores that are added."""
    found = read_slf(written(tmp_path, ON_LINKS))
    assert found.id == "a 1"
    assert found.labels == ("the", "'cause", 'm"an', "")
    ln10 = math.log(10)
    assert found.acoustic.tolist() == [-2 * ln10, -3 * ln10, -4 * ln10 - 0.125 * ln10, 0.0]
    assert found.lm.tolist() == [-ln10, -0.5 * ln10 - 0.25 * ln10, 0.0, 0.0]
    assert found.times.tolist() == [0.0, 0.5, 1.25, 1.25]
    assert found.scales == Scales(0.5, 12.5, -2 * ln10)
    assert found.details == ("v=2", "", "d=:a,0.5:", "")


def test_words_of_nodes_go_to_the_links_that_reach_them(tmp_path: Path) -> None:
    """And the word of the first node to a link before it."""
    found = read_slf(written(tmp_path, ON_NODES))
    assert [words_of(found, path) for path in all_paths(found)] == [("the", "man")]
    assert found.acoustic.sum() == -4.0
    assert found.id == "a"  # the file's name


def test_compressed_files_are_read(tmp_path: Path) -> None:
    """By their first bytes."""
    path = tmp_path / "b.lat.gz"
    path.write_bytes(gzip.compress(ON_NODES.encode()))
    assert read_slf(path).id == "b"
    path.write_bytes(gzip.compress(ON_NODES.encode())[:-20])
    with pytest.raises(LatticeError, match=r"b\.lat\.gz"):
        read_slf(path)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_read_as_it_was(tmp_path: Path, seed: int) -> None:
    """Every score by its bits, and labels that need quotes."""
    lattice = random_lattice(seed, words=["a b", "it's", '"', "\\", "=", "naïve", "x"])
    again = read_slf(written(tmp_path, slf_text(lattice)))
    assert again.id == lattice.id
    assert again.labels == tuple(label or "!NULL" for label in lattice.labels)
    for name in ("sources", "targets", "is_word", "acoustic", "lm", "times"):
        assert getattr(again, name).tolist() == getattr(lattice, name).tolist(), name
    assert slf_text(again) == slf_text(lattice)


def test_scales_and_fields_that_are_kept_are_written(tmp_path: Path) -> None:
    """Pronunciations and segmentations."""
    found = read_slf(written(tmp_path, ON_LINKS))
    again = read_slf(written(tmp_path, slf_text(found)))
    assert (again.scales, again.details) == (found.scales, found.details)


FAULTS = [
    ("J=2 S=1 E=2", "J=2 S=1 E=7", "line 12: field E names node 7"),
    ("J=2 S=1 E=2", "J=2 S=1", "line 12: field E is missing"),
    ("J=2 S=1 E=2", "J=2 S=-1 E=2", "line 12: field S is -1"),
    ("a=-4", "a=nan", "line 12: field a is nan"),
    ("a=-4", "a=-inf", "line 12: field a is -inf"),
    ("a=-4", "a=1e999", "line 12: field a is 1e999"),
    ("J=2 S=1 E=2", "J=2 S=1 E=0", "cycle"),
    ("J=2 S=1 E=2", "J=2 S=1 E=1", "line 12: .* to itself"),
    ("I=2 t=1.25", "I=1 t=1.25", "line 9: node 1 .*twice"),
    ("I=2 t=1.25", "I=2 t=late", "line 9: field t is not a number"),
    ("N=3 L=3", "N=3 L=4", "says 4 links, but the file has 3"),
    ("N=3 L=3", "N=4 L=3", "says 4 nodes, but the file has 3"),
    ("base=10", "base=0", "base is 0"),
    ("N=3 L=3", "start=9", "field start names node 9"),
    ("VERSION=1.0", "SUBLAT=digits", "line 2: sub-lattices"),
    ("I=1 time", "I=1 L=digits time", "line 8: sub-lattices"),
    ("# words", "words", "line 1: .*column 1"),
]


@pytest.mark.parametrize(("found", "instead", "told"), FAULTS)
def test_a_malformed_file_is_refused_where_it_is_wrong(
    tmp_path: Path, found: str, instead: str, told: str
) -> None:
    """The message has the file, and the line where there is one; no word."""
    assert found in ON_LINKS
    path = written(tmp_path, ON_LINKS.replace(found, instead))
    with pytest.raises(LatticeError, match=told) as caught:
        read_slf(path)
    assert str(path) in str(caught.value)
    assert "the v=" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "VERSION=1.0\nN=0 L=0\n", "VERSION=1.0\nI=0\n"])
def test_an_empty_lattice_is_refused(tmp_path: Path, text: str) -> None:
    """Nothing, or nothing but a header."""
    with pytest.raises(LatticeError, match="no arcs"):
        read_slf(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a1", "a1"), ("d/a.1.lat.gz", "a.1"), ("C:\\d\\a1.MFC", "a1.MFC"), (".slf", ".slf")],
)
def test_the_id_is_the_name_without_folders_and_endings(name: str, expected: str) -> None:
    """Endings of lattices, features and audio alone."""
    assert utterance_id(name) == expected
