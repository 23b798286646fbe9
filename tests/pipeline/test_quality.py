"""A model that learned little is not handed over without a word."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")

from dlm.pipeline.quality import held_out_warnings, shown, wordlist_warning

GOOD = {"perplexity": 100.0, "perplexity_of_topology": 369.0, "oovs": 10, "tokens": 100}


def test_a_model_that_is_worse_than_its_topology_is_said_to_be() -> None:
    """With both figures."""
    assert held_out_warnings(GOOD) == []
    (said,) = held_out_warnings({**GOOD, "perplexity": 2772352873892.62})
    assert "held-out perplexity 2.8e12 against 369.00" in said
    # Of a folder that was measured before the topology was.
    assert held_out_warnings({"perplexity": 1e12, "oovs": 0, "tokens": 10}) == []


def test_a_perplexity_of_unknown_words_is_said_to_be_one() -> None:
    """And a count of words that found few."""
    (said,) = held_out_warnings({**GOOD, "oovs": 97})
    assert "does not know 97% of the held-out words" in said
    assert wordlist_warning(87, 800) is None
    said = wordlist_warning(3, 2000) or ""
    assert "only 3 of the 2,000 words" in said


def test_a_perplexity_is_written_as_people_read_it() -> None:
    """Digits that mean something."""
    assert [shown(1234.567), shown(2772352873892.62)] == ["1,234.57", "2.8e12"]
