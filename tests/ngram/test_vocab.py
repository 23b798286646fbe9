"""Words are bytes, ids are places, and the unknown word is 0 in both its spellings."""

from __future__ import annotations

import numpy as np
import pytest

from dlm.ngram.vocab import UNK_ID, Vocabulary, as_bytes, as_text, is_unk_spelling

WORDS = [b"<unk>", b"<s>", b"</s>", b"caf\xe9", "\u00a0".encode(), "日本".encode()]


def test_ids_are_places_in_the_list() -> None:
    """Of bytes and of text alike."""
    vocabulary = Vocabulary(WORDS, unk_in_model=True)
    assert [vocabulary.id_of(word) for word in WORDS] == list(range(6))
    assert vocabulary.id_of("日本") == 5
    assert (vocabulary.begin_id, vocabulary.end_id) == (1, 2)
    assert len(vocabulary) == 6
    ids = vocabulary.ids_of(["<s>", "nowhere", b"caf\xe9"])
    assert ids.tolist() == [1, 0, 3]
    assert ids.dtype == np.uint32
    assert vocabulary.ids_of([]).shape == (0,)


def test_words_outside_and_both_spellings_of_unknown_have_id_0() -> None:
    """And are not counted as contained."""
    vocabulary = Vocabulary([b"<UNK>", b"a"], unk_in_model=True)
    for word in ("<unk>", "<UNK>", "nowhere"):
        assert vocabulary.id_of(word) == UNK_ID
        assert word not in vocabulary
    assert "a" in vocabulary
    assert vocabulary.words[UNK_ID] == b"<UNK>"


def test_bytes_that_are_not_utf8_pass_through_text() -> None:
    """By surrogate escapes, both ways."""
    assert as_bytes(as_text(b"caf\xe9")) == b"caf\xe9"
    assert as_bytes("caf\udce9") == b"caf\xe9"
    assert as_bytes("日") == "日".encode()
    assert Vocabulary(WORDS, unk_in_model=True).id_of("caf\udce9") == 3


def test_spellings_of_the_unknown_word_are_two() -> None:
    """No other case of letters."""
    assert is_unk_spelling(b"<unk>")
    assert is_unk_spelling(b"<UNK>")
    assert not is_unk_spelling(b"<Unk>")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "word 0"),
        ([b"a"], "word 0"),
        ([b"<unk>", b"a", b"a"], "twice"),
        ([b"<unk>", b"<UNK>"], "both spellings"),
    ],
)
def test_lists_that_are_no_vocabulary_are_refused(words: list[bytes], fault: str) -> None:
    """The unknown word stands first, in one spelling, and each word once."""
    with pytest.raises(ValueError, match=fault):
        Vocabulary(words, unk_in_model=True)


def test_vocabularies_are_equal_by_words_and_by_the_unknown_word() -> None:
    """And are not hashable, being lists in disguise."""
    one = Vocabulary(WORDS, unk_in_model=True)
    assert one == Vocabulary(WORDS, unk_in_model=True)
    assert one != Vocabulary(WORDS, unk_in_model=False)
    assert one != Vocabulary(WORDS[:-1], unk_in_model=True)
    assert one != WORDS
    with pytest.raises(TypeError):
        hash(one)
    assert "6 words" in repr(one)


def test_a_lone_surrogate_is_an_unknown_word_and_no_error() -> None:
    """Broken JSON can hold one; bytes that are not UTF-8 keep their own escapes."""
    vocabulary = Vocabulary([b"<unk>", b"<s>", b"</s>", b"caf\xe9"], unk_in_model=True)
    assert vocabulary.id_of("\ud800") == 0
    assert vocabulary.id_of("caf\udce9") == 3
