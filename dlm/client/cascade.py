"""What to answer when a message failed.

Today a failed message is an error for its caller. The seam is here: a `Fallback` gets the queries
that failed and may answer them from what is local; the state machines that decide between replica,
partial model and small model will stand behind it.

Paper: DLM 3.4.
"""

from __future__ import annotations

from typing import Protocol

from dlm.errors import DlmError
from dlm.ngram.query import Answers, QueryGroups


class Fallback(Protocol):
    """Answers instead of a shard."""

    def answer(self, groups: QueryGroups, error: DlmError) -> Answers | None:
        """Answers to every query of `groups`, or None: then `error` goes to the caller."""


class NoFallback:
    """A failed message is an error."""

    def answer(self, groups: QueryGroups, error: DlmError) -> Answers | None:
        """None: `error` goes to the caller."""
        return None
