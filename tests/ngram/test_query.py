"""Queries and answers as arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dlm.ngram.query import Answers, QueryGroups


def test_room_for_answers_has_the_types_of_the_contract() -> None:
    """float32 and three times uint8, of one length; all of the full model."""
    answers = Answers.empty(3)
    assert len(answers) == 3 and answers.source is None
    names = [f.name for f in dataclasses.fields(answers) if f.name != "source"]
    types = [getattr(answers, name).dtype for name in names]
    assert types == [np.float32, np.uint8, np.uint8, np.uint8]
    assert len(Answers.empty(0)) == 0


def test_queries_and_answers_cannot_be_rebound() -> None:
    """They pass between threads; only the arrays of answers are filled, once."""
    groups = QueryGroups(*(np.zeros(0, t) for t in (np.uint8, np.uint32, np.uint32, np.uint32)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        groups.words = np.ones(1, np.uint32)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Answers.empty(1).log10_prob = np.ones(1, np.float32)  # type: ignore[misc]
