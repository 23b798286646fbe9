"""States that are written down as words and made again."""

from __future__ import annotations

import pytest

from client.scripted import Clients
from cluster import Cluster, ModelFiles
from dlm.client import Client
from dlm.errors import QueryError


def test_states_made_of_their_words_are_the_same_states(client: Client) -> None:
    """Those of a search, on another utterance; and they score alike."""
    utterance, other = client.utterance(), client.utterance()
    words = [1, 5, 9]
    first = utterance.extend([utterance.begin(), utterance.null()], words)
    states = utterance.extend(first.states.reshape(-1), words).states.reshape(-1)
    again = other.states_after(states.contexts())
    assert list(again) == list(states)
    assert utterance.states(list(states)).contexts() == states.contexts()
    expected = utterance.extend(states, words).log10_prob
    assert (other.extend(again, words).log10_prob == expected).all()


def test_a_context_keeps_its_last_words(
    files: ModelFiles, cluster: Cluster, connect: Clients
) -> None:
    """Order - 1 of them, strings or ids; the empty one is the state that knows nothing."""
    utterance = connect(cluster).utterance()
    a, b = files.words()[5:7]
    states = utterance.states_after([[a] * 9 + [b], [], [5]])
    assert states.contexts() == [(5,) * (utterance.order - 2) + (6,), (), (5,)]
    assert states[1] == utterance.null()
    with pytest.raises(QueryError, match=r"contexts is "):
        utterance.states_after("a b")
    with pytest.raises(QueryError, match=r"contexts\[0\] is "):
        utterance.states_after(["a b"])
