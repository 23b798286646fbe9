"""Word errors, their intervals, and files of what was said."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlm.asr.speech.wer import (
    WordErrors,
    align,
    distance,
    error_rate,
    paired,
    rate_difference,
    read_transcripts,
    spoken_words,
    total,
    with_kaldi_names,
    word_errors,
)
from dlm.errors import QueryError, TextError

WORDS = st.lists(st.sampled_from("abcd"), max_size=8)


def plain_distance(reference: list[str], hypothesis: list[str]) -> int:
    """Levenshtein's recursion."""

    @cache
    def errors(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        return min(
            errors(i - 1, j) + 1,
            errors(i, j - 1) + 1,
            errors(i - 1, j - 1) + (reference[i - 1] != hypothesis[j - 1]),
        )

    return errors(len(reference), len(hypothesis))


@settings(max_examples=100, deadline=None)
@given(WORDS, WORDS)
def test_an_alignment_is_a_shortest_way(reference: list[str], hypothesis: list[str]) -> None:
    """Its steps say both sentences, and as many are errors as Levenshtein's distance."""
    steps = align(reference, hypothesis)
    assert [word for _, word, _ in steps if word is not None] == reference
    assert [word for _, _, word in steps if word is not None] == hypothesis
    for kind, one, other in steps:
        expected = "D" if other is None else "I" if one is None else "=" if one == other else "S"
        assert kind == expected
    errors = word_errors(reference, hypothesis)
    assert errors.errors == plain_distance(reference, hypothesis)
    assert distance(reference, hypothesis) == errors.errors
    assert errors.words == len(reference)


def test_the_example_of_equation_15() -> None:
    """One deletion, two substitutions and one insertion in five words."""
    errors = word_errors(["a", "b", "c", "d", "e"], ["x", "b", "d", "y", "z"])
    assert errors.errors == 4
    assert errors.rate == 0.8


def test_counts_add_up_and_no_words_have_no_rate() -> None:
    """An empty reference has insertions only."""
    none = word_errors([], ["a", "b"])
    assert (none.rate, none.insertions) == (None, 2)
    assert total([none, word_errors(["a"], [])]) == WordErrors(1, 0, 1, 2)


def test_words_are_compared_as_they_are_said() -> None:
    """Case, punctuation and the kind of an apostrophe do not count."""
    assert spoken_words("“Don’t!” – he said; 'Twas well-known.") == [
        "don't", "he", "said", "twas", "well", "known",
    ]  # fmt: skip
    assert spoken_words("Ça va, été 42_000") == ["ça", "va", "été", "42", "000"]


def groups(rng: np.random.Generator, count: int, rate: float) -> list[WordErrors]:
    """Speakers of some hundred words each."""
    words = rng.integers(100, 400, count)
    return [WordErrors(int(n), int(rng.binomial(n, rate))) for n in words]


@pytest.mark.promise("wer_intervals")
def test_an_interval_holds_the_true_rate_as_often_as_it_says() -> None:
    """About 95 of 100 samples; never far from it with this seed."""
    rng = np.random.default_rng(5)
    found = [error_rate(groups(rng, 20, 0.1), draws=500) for _ in range(200)]
    held = np.mean([one.low <= 0.1 <= one.high for one in found])
    assert 0.88 < held < 0.99


def test_a_paired_difference_is_surer_than_two_rates() -> None:
    """Speakers differ more from each other than two recognisers on the same speaker do."""
    rng = np.random.default_rng(6)
    rates = rng.uniform(0.02, 0.4, 17)
    first = [WordErrors(300, int(300 * rate)) for rate in rates]
    second = [WordErrors(300, int(300 * rate) + 6) for rate in rates]
    difference = rate_difference(first, second)
    assert difference.value == pytest.approx(0.02)
    assert 0.0 < difference.low <= difference.value <= difference.high
    assert difference.high - difference.low < 0.2 * (error_rate(first).high - error_rate(first).low)
    assert rate_difference(second, first).value == -difference.value


def test_intervals_are_the_same_each_time() -> None:
    """The draws are seeded."""
    one = groups(np.random.default_rng(7), 9, 0.2)
    assert error_rate(one) == error_rate(one)
    assert error_rate(one) != error_rate(one, seed=2)


def test_what_has_no_interval_is_refused() -> None:
    """One group, empty groups, and pairs of different references."""
    with pytest.raises(QueryError, match="at least 2"):
        error_rate([WordErrors(5, 1)])
    with pytest.raises(QueryError, match="no words"):
        error_rate([WordErrors(5, 1), WordErrors()])
    with pytest.raises(QueryError, match="references"):
        rate_difference([WordErrors(5), WordErrors(6)], [WordErrors(5), WordErrors(7)])


FORMS = {
    "table": "file\tspeaker\ttext\naudio/a.flac\t1\tOne two.\naudio/b.flac\t2\tThree\n",
    "tabs": "x/a.flac\tone two\ny/b.flac\tthree\n",
    "json": '{"file": "a.wav", "text": "won", "partial": true}\n{"file": "a.wav", "text": "one"}\n'
    '{"file": "a.wav", "text": "two"}\n'
    '{"file": "b.wav", "text": "three"}\n',
    "rescored .jsonl": '{"id": "a.wav", "hyps": [{"words": "one", "acoustic": -1.5, "lm": -2.0}]}\n'
    '{"id": "a.wav:20.00", "hyps": [{"words": "two", "acoustic": 0.0, "lm": -2.0}]}\n'
    '{"id": "b.wav", "hyps": [{"words": "three", "lm": 0.0}, {"words": "tree", "lm": 1.0}]}\n',
    "rescored text": "a.wav -1.5 -2.0 one\na.wav:20.00 0.0 -2e-07 two\n"
    "b.wav -1.0 63851462229346.0 three\nb.wav -1.0 -2.0 tree\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_each_form_of_a_reference_pairs_with_each_of_a_hypothesis(
    tmp_path: Path, form: str, other: str
) -> None:
    """Names are those of files, wherever these lie and whatever kind they are."""
    for name in (form, other):
        (tmp_path / name).write_text(FORMS[name])
    said, heard = read_transcripts(tmp_path / form), read_transcripts(tmp_path / other)
    pairs = paired(said, heard)
    assert len(pairs) == 2
    for one, two in pairs.values():
        assert spoken_words(one) == spoken_words(two)
    assert list(said.speakers.values()) == (["1", "2"] if form == "table" else [])


def test_lines_without_names_are_paired_by_their_number(tmp_path: Path) -> None:
    """An empty line is an utterance in which nothing was said."""
    (tmp_path / "said").write_text("one two\n\nthree\n")
    (tmp_path / "heard").write_text("one\n\nthree\n")
    files = [read_transcripts(tmp_path / name) for name in ("said", "heard")]
    assert list(paired(*files).values()) == [("one two", "one"), ("", ""), ("three", "three")]


KALDI = "u1-01 one two\nu1-02\nu2-01 three\n"


@pytest.mark.parametrize("heard", [KALDI, "u1-01\tone two\nu1-02\t\nu2-01\tthree\n", FORMS["json"]])
def test_names_before_a_space_are_told_from_words(tmp_path: Path, heard: str) -> None:
    """As Kaldi has them; they are in no text then."""
    said = KALDI if "u1-01" in heard else KALDI.replace("u", "v")
    (tmp_path / "said").write_text(said)
    (tmp_path / "heard").write_text(heard)
    files = (read_transcripts(tmp_path / "said"), read_transcripts(tmp_path / "heard"))
    found = with_kaldi_names(*files)
    if "u1-01" not in heard:
        assert found == files
        return
    assert dict(paired(*found)) == {
        "u1-01": ("one two", "one two"), "u1-02": ("", ""), "u2-01": ("three", "three"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("the man\na dog\n", "the men\na dog\n"),  # equal first words, which are no names
        ("1 dog\n1 cat\n", "1 dog\n1 cat\n"),  # each occurs twice
        ("1 dog\n2 cats\n", "1 dog\n3 cats\n"),  # others there
        ("1 dog\n", "1 dog\n"),  # a single line says too little
        ("a 1 2\n", "a 1 2\n"),  # digits that were spoken are not scores
    ],
)
def test_text_that_begins_alike_keeps_its_first_words(
    tmp_path: Path, said: str, heard: str
) -> None:
    """They count as words."""
    (tmp_path / "said").write_text(said)
    (tmp_path / "heard").write_text(heard)
    files = (read_transcripts(tmp_path / "said"), read_transcripts(tmp_path / "heard"))
    assert with_kaldi_names(*files) == files


def test_a_quote_that_is_not_closed_takes_no_line_with_it(tmp_path: Path) -> None:
    """In a table, too."""
    (tmp_path / "said").write_text('id\ttext\na\t"one\nb\ttwo "\n')
    assert read_transcripts(tmp_path / "said").texts == {"a": '"one', "b": 'two "'}


@pytest.mark.parametrize(
    ("said", "heard", "message"),
    [
        ("a\tx\nb\ty\n", "a\tx\n", "1 of 2 .*'b'"),
        ("a\tx\n", "a\tx\nc\ty\n", "1 hypotheses.*'c'"),
        ("a\tx\na\ty\n", "a\tx\n", "has 'a' twice"),
        ("x/a\tx\ny/a\ty\n", "a\tx\n", "file name"),
        ("a\tx\n", "x\n", "reference .*hypothesis"),
        ("a\tx\nb\n", "a\tx\n", "line 2 .* no tab"),
        ("file\ttext\na\tx\ty\n", "a\tx\n", "line 2 .* 3 columns; expected 2"),
        ("{}\n", "a\tx\n", "line 1 .*--json"),
        ("{\n", "a\tx\n", "line 1 .*--json"),
        (" \n", "a\tx\n", "no utterances"),
        ("\udcff", "a\tx\n", "not UTF-8"),
    ],
)
def test_files_that_do_not_fit_are_typed_errors(
    tmp_path: Path, said: str, heard: str, message: str
) -> None:
    """With the place."""
    (tmp_path / "said").write_bytes(said.encode(errors="surrogateescape"))
    (tmp_path / "heard").write_text(heard)
    with pytest.raises(TextError, match=message):
        paired(read_transcripts(tmp_path / "said"), read_transcripts(tmp_path / "heard"))
