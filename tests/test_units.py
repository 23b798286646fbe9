"""Numbers as text."""

from __future__ import annotations

import pytest

from dlm.units import counted, size_text


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (0, "line", "0 lines"),
        (1, "line", "1 line"),
        (2, "empty line", "2 empty lines"),
        (1200, "n-gram", "1,200 n-grams"),
        (1, "query", "1 query"),
        (3, "query", "3 queries"),
        (2, "process", "2 processes"),
        (3, "day", "3 days"),
    ],
)
def test_one_is_singular_and_every_other_number_plural(number: int, noun: str, said: str) -> None:
    """With thousands separated."""
    assert counted(number, noun) == said


@pytest.mark.parametrize(
    ("count", "told"),
    [(512 << 10, "512 KiB"), (1 << 20, "1.0 MiB"), (37_853_593, "36.1 MiB"), (2 << 30, "2.0 GiB")],
)
def test_sizes(count, told) -> None:
    """Binary units, named so."""
    assert size_text(count) == told
