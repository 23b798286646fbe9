"""A model's words as strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlm.ngram.vocab import Vocabulary, as_text


class Words(Sequence[str]):
    """The words of a vocabulary by id; not copied."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self._vocabulary)

    def __getitem__(self, at: Any) -> Any:
        found = self._vocabulary.words[at]
        return as_text(found) if isinstance(found, bytes) else [as_text(word) for word in found]

    def __contains__(self, word: object) -> bool:
        return isinstance(word, (str, bytes)) and word in self._vocabulary

    def __repr__(self) -> str:
        return f"Words({len(self)})"
