"""The table of words gives a dictionary's answers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlm.ngram import kernels
from dlm.ngram.vocab import Vocabulary
from dlm.ngram.wordtable import WordTable

# Lengths on both sides of eight and its multiples, few letters, so that words share much.
WORD = st.one_of(
    st.binary(max_size=4),
    st.text("ab", max_size=26).map(str.encode),
    st.builds(lambda n, tail: b"x" * n + tail, st.integers(0, 600), st.binary(max_size=2)),
    st.sampled_from(
        [b"<unk>", b"<UNK>", b"<unk", b"<s>", b"</s>", b"\0", b"\0\0", b"\0" * 8, b"\0" * 9]
    ),
)


def vocabulary_of(words: list[bytes]) -> Vocabulary:
    """A vocabulary of words that may repeat."""
    rest = [w for w in dict.fromkeys(words) if w not in (b"<unk>", b"<UNK>")]
    return Vocabulary([b"<unk>", *rest], unk_in_model=True)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(words=st.lists(WORD, max_size=60), asked=st.lists(WORD, max_size=60))
def test_table_agrees_with_the_vocabulary(words: list[bytes], asked: list[bytes]) -> None:
    """Whole, built word by word, and from arrays; for words it has and words it has not."""
    vocabulary = vocabulary_of(words)
    whole = WordTable.from_vocabulary(vocabulary)
    grown = WordTable()
    for i, word in enumerate(vocabulary.words[1:], start=1):
        assert grown.find(word) is None
        assert grown.add(word) == i
    text = b"".join(vocabulary.words)
    begin = np.cumsum([0, *map(len, vocabulary.words)]).astype(np.uint32)
    arrays = WordTable.from_arrays(np.frombuffer(text, np.uint8), begin)
    for table in (whole, grown, arrays):
        assert len(table) == len(vocabulary)
        assert table.words() == vocabulary.words
        got = table.ids_of(words + asked)
        assert got.dtype == np.uint32
        assert got.tolist() == vocabulary.ids_of(words + asked).tolist()
        for word in asked:
            assert table.find(word) == vocabulary.ids.get(word)
        assert [table.word(i) for i in range(len(table))] == vocabulary.words
        again = table.vocabulary(unk_in_model=True)
        assert (len(again), again) == (len(vocabulary), vocabulary)
        assert (again.begin_id, again.end_id) == (vocabulary.begin_id, vocabulary.end_id)
        assert again.ids == vocabulary.ids
        assert WordTable.from_vocabulary(again) is table


@settings(max_examples=120, deadline=None, derandomize=True)
@given(words=st.lists(WORD, max_size=10), text=st.binary(max_size=200), data=st.data())
def test_text_is_split_and_looked_up_as_plain_code_does(
    words: list[bytes], text: bytes, data: st.DataObject
) -> None:
    """Lines, then spaces; with any bytes and any spaces."""
    gaps = [b" ", b"\t", b"\n", b"\r", b"  \n", b"\v"]
    pieces = [words[i % len(words)] for i in range(20)] if words else [b"a"]
    for piece in pieces:
        text += piece + data.draw(st.sampled_from(gaps))
    spaces = data.draw(st.sampled_from([b" \t\r", b" ", b"", b"\0 ", b" \t\r\v\f\x1f"]))
    vocabulary = vocabulary_of(words)
    table = WordTable.from_vocabulary(vocabulary)
    split = re.compile(b"[" + re.escape(spaces) + b"\n]+")
    lines = [[w for w in split.split(line) if w] for line in text.split(b"\n")]
    first = np.cumsum([0, *map(len, lines)]).tolist()
    flat = [word for line in lines for word in line]
    expected = vocabulary.ids_of(flat).tolist()
    ids, sentence_begin = table.ids_of_text(text, spaces=spaces)
    assert ids.dtype == np.uint32
    assert ids.tolist() == expected
    assert sentence_begin.tolist() == first


def test_empty_text_is_one_sentence_without_words() -> None:
    """As "".split("\\n") has it; a newline at the end begins another sentence."""
    table = WordTable([b"<unk>", b"a"])
    for text, begin in ((b"", [0, 0]), (b"\n", [0, 0, 0]), (b"a\n", [0, 1, 1]), (b"a", [0, 1])):
        assert table.ids_of_text(text)[1].tolist() == begin
    assert table.ids_of([]).tolist() == []


def test_strings_are_the_bytes_that_the_vocabulary_takes_them_for() -> None:
    """ASCII, other letters, bytes that are no text, lone surrogates, and mixtures with bytes."""
    odd = "\udcff".encode("utf-8", "surrogateescape")
    vocabulary = Vocabulary(
        [b"<unk>", b"a", "ä".encode(), odd, b"long ascii word"], unk_in_model=True
    )
    table = WordTable.from_vocabulary(vocabulary)
    for words in (
        ["a", "b", "", "long ascii word"],
        ["a", "ä", "\udcff", "\ud800", "b"],
        [b"a", "a", "ä", odd],
        ["a", b"a"],
        [b"a", odd, b""],
    ):
        assert table.ids_of(words).tolist() == vocabulary.ids_of(words).tolist()


def test_words_whose_hashes_fall_on_one_place_are_told_apart(plain) -> None:
    """Forty words that all begin their search at the last slot, and run on past the end."""
    mask, chosen = np.uint64(126), []
    i = 0
    while len(chosen) < 40:
        word = b"w%d" % i
        first = np.uint64(int.from_bytes(word[:8], "little"))
        text = np.frombuffer(word + bytes(8), np.uint8)
        if kernels.hash_word(text, 0, len(word), first) & mask == mask:
            chosen.append(word)
        i += 1
    table = WordTable([b"<unk>", *chosen])
    assert len(table.slots) == 128
    assert table.ids_of(chosen).tolist() == list(range(1, 41))
    assert table.find(b"w%d" % i) is None
    assert not table.ids_of([b"v%d" % i for i in range(1000)]).any()


def test_word_with_a_newline_comes_back_whole() -> None:
    """The quick way to list words is for words without one."""
    words = [b"<unk>", b"a\nb", b"", b"c"]
    assert WordTable(words).words() == words


@pytest.mark.parametrize(
    "words", [[], [b"a"], [b"<unk>", b"a", b"a"], [b"<unk>", b"<UNK>"], [b"<unk>", b"<unk>"]]
)
def test_what_is_no_vocabulary_is_refused(words: list[bytes]) -> None:
    """The unknown word comes first, and each word once."""
    with pytest.raises(ValueError):
        WordTable(words)


def test_arrays_that_do_not_fit_are_refused() -> None:
    """Offsets out of order, beyond the bytes, or short of them never reach a kernel."""
    text = np.frombuffer(b"<unk>ab", np.uint8)
    for begin in ([0, 5, 4, 7], [0, 5, 8], [0, 5, 6], [1, 5, 7], [0], [0, 7]):
        with pytest.raises(ValueError):
            WordTable.from_arrays(text, np.array(begin, np.int64))
    table = WordTable([b"<unk>", b"a"])
    with pytest.raises(ValueError):
        table.add(b"a")
    with pytest.raises(ValueError):
        table.add(b"<UNK>")
    with pytest.raises(ValueError):
        table.spell_unk(b"a")
    with pytest.raises(ValueError, match="white space"):
        table.ids_of_text(b"a", spaces=b",")


def test_arrays_that_cannot_be_written_are_taken() -> None:
    """As maps of files are."""
    text = np.frombuffer(b"<unk>ab", np.uint8)
    begin = np.array([0, 5, 6, 7])
    begin.flags.writeable = False
    assert WordTable.from_arrays(text, begin).ids_of_text(b"a b")[0].tolist() == [1, 2]
