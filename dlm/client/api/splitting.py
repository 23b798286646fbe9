"""Splits text into words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dlm.ngram.vocab import as_bytes

# As in ARPA files, words are split at spaces and tabs; a line end cannot be part of a word either.
SPACES = " \t\r\n"
_SPACES = re.compile(rb"[ \t\r\n]+")
_SPACES_OF_TEXT = re.compile(f"[{SPACES}]+")
SPLIT_BYTES = 1 << 16  # bytes of a sentence split at a time


def split_words(sentence: str | bytes) -> list[bytes]:
    """The words of a sentence, split at spaces, tabs and line ends, nowhere else."""
    return [word for some in split_parts(sentence) for word in some]


def split_text(text: str) -> list[str]:
    """The same of a string, as strings."""
    return [word for word in _SPACES_OF_TEXT.split(text) if word]


def split_parts(sentence: str | bytes) -> Iterator[list[bytes]]:
    """The same, some words at a time."""
    text = as_bytes(sentence)
    begin = 0
    while begin < len(text):
        cut = _SPACES.search(text, begin + SPLIT_BYTES) if len(text) - begin > SPLIT_BYTES else None
        end = len(text) if cut is None else cut.end()
        yield [w for w in _SPACES.split(text[begin:end]) if w]
        begin = end
