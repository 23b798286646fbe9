"""N-best lists: read, written, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlm.asr.rescoring.nbest import Hypothesis, NbestList, nbest_json, nbest_text, read_nbest
from dlm.errors import ConfigError, LatticeError

LISTS = [
    NbestList("a1", (Hypothesis(("the", "man"), -12.5, -7.1), Hypothesis((), -0.1, -1e-30))),
    NbestList("b 2", (Hypothesis(("naïve",), 0.0, 0.0),)),
]


def test_json_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Every bit of a score; a score that is missing is 0, other fields are left alone."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + "".join(map(nbest_json, LISTS)))
    assert list(read_nbest(path)) == LISTS
    path.write_text('{"id": "a", "hyps": [{"words": " x  y ", "time": 1}], "more": 2}\n')
    assert list(read_nbest(path)) == [NbestList("a", (Hypothesis(("x", "y")),))]


def test_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The lines of an utterance are one list."""
    path = tmp_path / "a.txt"
    lists = [LISTS[0], NbestList("b2", LISTS[1].hypotheses)]
    path.write_text("".join(map(nbest_text, lists)), encoding="utf-8")
    assert list(read_nbest(path)) == lists


def test_words_are_split_where_those_of_the_model_are(tmp_path: Path) -> None:
    """Not at a no-break space, say, which may be part of a word or of a phrase."""
    lists = [NbestList("a\u3000b", (Hypothesis(("dr\u00a0no", "x\x0cy"), -1.0, -2.0),))]
    for name, write in (("a.txt", nbest_text), ("a.jsonl", nbest_json)):
        path = tmp_path / name
        path.write_text("".join(map(write, lists)), encoding="utf-8")
        assert list(read_nbest(path)) == lists


def test_an_id_with_a_space_is_refused_in_text() -> None:
    """It would be read as another id and a score."""
    with pytest.raises(ConfigError, match=r"'b 2' .*JSON"):
        nbest_text(LISTS[1])


def test_scores_that_are_partial_are_told(tmp_path: Path) -> None:
    """And nothing where none is."""
    assert "bigram_fallback" not in json.loads(nbest_json(LISTS[0]))
    assert json.loads(nbest_json(NbestList("a", LISTS[0].hypotheses, 3)))["bigram_fallback"] == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"id": "a", "hyps": [{"words": "x"}]}\n{"id": "b"', "line 2: not JSON"),
        ("{}", "line 1: .*hyps"),
        ('{"id": "", "hyps": [{"words": "x"}]}', "line 1: .*hyps"),
        ('{"id": "a", "hyps": []}', "line 1: .*'a' .*hyps"),
        ('{"id": "a", "hyps": ["x"]}', r"line 1: hyps\[0\] of 'a'"),
        ('{"id": "a", "hyps": [{"words": 1}]}', r"line 1: hyps\[0\] of 'a' is not a hyp"),
        ('{"id": "a", "hyps": [{"words": "x", "lm": "1"}]}', r"lm of hyps\[0\] of 'a'"),
        ('{"id": "a", "hyps": [{"words": "x", "lm": true}]}', r"lm of hyps\[0\] of 'a'"),
        ('{"id": "a", "hyps": [{"words": "x", "acoustic": NaN}]}', "acoustic of hyps"),
        ("{" + '"x":[' * 100_000, "line 1: not JSON"),
        ("a 1 2 x\nb 1 x\n", "line 2: .*ACOUSTIC LM"),
        ("a 1\n", "line 1: .*ACOUSTIC LM"),
        ("a nan 1 x\n", "line 1: .*ACOUSTIC LM"),
        ("a 1 2 x\nb 1 2 x\na 1 2 y\n", "line 3: .*'a'"),
    ],
)
def test_a_malformed_list_is_refused_where_it_is_wrong(
    tmp_path: Path, text: str, told: str
) -> None:
    """The message has the file and the line."""
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(LatticeError, match=told) as caught:
        list(read_nbest(path))
    assert str(path) in str(caught.value)


def test_an_empty_file_has_no_lists(tmp_path: Path) -> None:
    """Nothing is wrong with it."""
    path = tmp_path / "a.txt"
    path.write_text("\n")
    assert list(read_nbest(path)) == []
