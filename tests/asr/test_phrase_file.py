"""Files of phrases, as the commands read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm.asr.phrase_file import BONUS, read_phrases
from dlm.errors import TextError

FILE = """\ufeffthe man\t0.5

doctor  strangelove\t2.5\tstrangelove=s t\tstrangelove=s d\r
peter sellers\t\t \t
no bonus\t\tbonus=b o
"""


def test_a_file_has_phrases_bonuses_and_sounds(tmp_path: Path) -> None:
    """One per line; what is left out has a default."""
    path = tmp_path / "names.tsv"
    path.write_text(FILE, encoding="utf-8")
    found = read_phrases(path)
    assert found.phrases.weights == {
        b"the man": 0.5, b"doctor strangelove": 2.5, b"peter sellers": BONUS, b"no bonus": BONUS
    }  # fmt: skip
    assert found.sounds == {"strangelove": [("s", "t"), ("s", "d")], "bonus": [("b", "o")]}
    assert "strangelove" not in repr(found)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "no phrases"),
        (b"a\n\xff\n", "byte 2"),
        (b"a\n\nb\tmuch\n", "line 3"),
        (b"a\tnan\n", "line 1"),
        (b"a\t1e9\n", "line 1"),
        (b"a\n\t2.0\n", "line 2"),
        (b"a <unk>\n", "line 1"),
        (b"w " * 40 + b"\n", "40 words"),
        (b"a\t1\na\t2\n", "line 2"),
        (b"a\t1\tb=x\n", "line 1"),
        (b"a\t1\ta=\n", "line 1"),
        (b"a\t1\tx y\n", "line 1"),
    ],
)
def test_a_line_that_cannot_be_a_phrase_is_named(tmp_path: Path, content: bytes, fact: str) -> None:
    """By its number; not by its words."""
    path = tmp_path / "names.tsv"
    path.write_bytes(content)
    with pytest.raises(TextError) as caught:
        read_phrases(path)
    assert fact in str(caught.value) and str(path) in str(caught.value)
